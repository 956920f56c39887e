"""Text to batches: sources, tokenizers, token files, packing, the Grain loader."""
