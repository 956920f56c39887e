"""Which tiles a kernel works in: a small table per chip, in pallas_kernels/tiles, filled by measuring on that chip.

    product, [D, F], kind of GPU --tiles/h200.json--> the entry of this very shape, else that of the nearest, else none

A table's `measured` says when, with what jax and by which seed its entries were timed; null means that nobody has timed
any, and every kernel takes its default (`GEMM_TILES`, `WEIGHT_GRAD_TILES` in its file), a first choice by arithmetic:
the largest tile whose sums fit the registers, or tensor memory, of a block, and as many stages as fill shared memory.
`python -m pallas_kernels.bench --autotune` writes one.
"""

import dataclasses
import functools
import json
import math
from pathlib import Path
from typing import Any

from pallas_kernels.grouped_gemm_tiles import Tiles

FOLDER = Path(__file__).parent / "tiles"
CHIPS = ("h100", "h200", "b200", "b300")
PRODUCTS = ("gemm", "gemm_transposed", "swiglu", "weight_grad")


def chip_of(device_kind: str) -> str | None:
    """The table's name for a device that calls itself so, e.g. "NVIDIA H100 80GB HBM3" or "NVIDIA GB200"."""
    words = device_kind.lower().replace("gb", "b").replace("gh", "h").split()
    return next((chip for chip in CHIPS if chip in words), None)


@functools.cache
def load(chip: str) -> dict[str, Any]:
    """The table: {"measured": null or a dict, "entries": [{"product", "depth", "width", "tiles"}]}."""
    path = FOLDER / f"{chip}.json"
    return json.loads(path.read_text()) if path.exists() else {"measured": None, "entries": []}


def tiles_for(chip: str | None, product: str, depth: int, width: int, default: Tiles) -> Tiles:
    """Tiles of a product whose contraction is `depth` and whose result is `width` wide (for weight_grad: [D, F])."""
    entries = [entry for entry in load(chip)["entries"] if entry["product"] == product] if chip else []
    if not entries:
        return default

    def distance(entry: dict[str, Any]) -> float:
        return abs(math.log2(entry["depth"] / depth)) + abs(math.log2(entry["width"] / width))

    return Tiles(**min(entries, key=distance)["tiles"])


def save(chip: str, measured: dict[str, Any], entries: list[dict[str, Any]]) -> Path:
    """Writes a chip's table whole, entries as `load` gives them, `tiles` a `Tiles`."""
    plain = [entry | {"tiles": dataclasses.asdict(entry["tiles"])} for entry in entries]
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / f"{chip}.json"
    path.write_text(json.dumps({"measured": measured, "entries": plain}, indent=1) + "\n")
    load.cache_clear()
    return path
