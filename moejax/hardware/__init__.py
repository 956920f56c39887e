"""GPUs: their figures, and compiling for one that is not there."""
