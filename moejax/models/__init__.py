"""Flax modules: norms, attention, blocks, head, transformer. They declare logical axes and know no mesh."""
