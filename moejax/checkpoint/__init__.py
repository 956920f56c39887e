"""Saving and restoring runs, and carrying models in from other systems."""
