"""Mixture of experts: router, losses, dispatch and its transports, experts, layer."""
