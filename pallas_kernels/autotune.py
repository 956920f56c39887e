"""Times the tiles that a kernel could work in, on the GPU at hand, and writes the best ones into its chip's table.

    shapes x products x candidates --compile, time, in turn--> the fastest of each --> pallas_kernels/tiles/CHIP.json

`python -m pallas_kernels.bench --autotune`. Candidates are few: what the registers or tensor memory and the shared
memory of a block allow. One that the compiler refuses is left out, and said to be.
"""

import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import grouped_gemm_mosaic, tile_table
from pallas_kernels.grouped_gemm_tiles import Tiles

SMEM_BYTES = 232_448  # of a block, on sm_90 and sm_100
REPEATS = 9


def candidates(product: str) -> list[Tiles]:
    """The tiles that fit: a stage is rows x depth and depth x columns values of two bytes, beside 32 KiB to store."""
    sizes = itertools.product((128, 256), (2, 3, 4, 6), (4, 8, 16))
    every = [Tiles(rows=128, columns=columns, depth=64, stages=stages, panel=panel) for columns, stages, panel in sizes]
    store = 16_384 if product == "weight_grad" else 32_768
    return [t for t in every if t.stages * t.depth * (t.rows + t.columns) * 2 + store + 1024 <= SMEM_BYTES]


def autotune(
    shapes: Mapping[str, Mapping[str, Any]],
    seed: int,
    report: Callable[[str], None],
    measure: Callable[[str, Any, Tiles, int], float] | None = None,
) -> Any:
    """Tune every product of every shape (`bench.Shape`) for the GPU of this process; the path of the table written.

    measure(product, shape, tiles, seed): seconds of a call; raises where the compiler refuses the tiles.
    Raises ValueError where there is no GPU that has a table.
    """
    kind = jax.devices()[0].device_kind
    chip = tile_table.chip_of(kind)
    if chip is None:
        raise ValueError(f"Tiles are tuned on one of {', '.join(tile_table.CHIPS)}, and this process has {kind!r}.")
    measure = measure or seconds_of
    entries: dict[tuple[str, int, int], dict[str, Any]] = {}
    for name, products in shapes.items():
        for part, shape in products.items():
            for product in tile_table.PRODUCTS:
                if product == "swiglu" and part != "up_gate":
                    continue
                depth, width = (shape.width, shape.hidden)[:: -1 if product == "gemm_transposed" else 1]
                if (product, depth, width) in entries:
                    continue
                times: dict[Tiles, float] = {}
                for tiles in candidates(product):
                    try:
                        times[tiles] = measure(product, shape, tiles, seed)
                    except Exception as error:
                        report(f"{name} {part} {product} {tiles}: refused, {str(error).splitlines()[0][:120]}")
                if times:
                    best = min(times, key=lambda tiles: times[tiles])
                    entries[product, depth, width] = {
                        "product": product, "depth": depth, "width": width, "tiles": best,
                        "microseconds": round(1e6 * times[best], 1),
                    }  # fmt: skip
                    report(f"{name} {part} {product}: {1e6 * times[best]:.0f} us by {best}")
    measured = {"device": kind, "jax": jax.__version__, "seed": seed, "repeats": REPEATS}
    return tile_table.save(chip, measured, list(entries.values()))


def seconds_of(product: str, shape: Any, tiles: Tiles, seed: int) -> float:
    """Median seconds of a call over even groups, random values; the first call, which compiles, does not count."""
    from pallas_kernels.bench import _Call, draw_group_sizes

    rng = np.random.default_rng(seed)
    sizes = jnp.asarray(draw_group_sizes(shape.groups, shape.rows, "uniform", seed))
    random = lambda *dims: jnp.asarray(rng.standard_normal(dims, np.float32), jnp.bfloat16)  # noqa: E731
    lhs, grad = random(shape.rows, shape.width), random(shape.rows, shape.hidden)
    kernel = functools.partial(grouped_gemm_mosaic.kernel(product), tiles=tiles)
    if product == "weight_grad":
        call = _Call(lambda x, g: kernel(x, g, sizes), lhs, grad)
    elif product == "swiglu":
        call = _Call(
            lambda x, w: kernel(x, w, sizes, keep=True)[0], lhs, random(shape.groups, shape.width, shape.hidden)
        )
    else:
        weight = random(shape.groups, shape.width, shape.hidden)
        call = _Call(lambda x, w: kernel(x, w, sizes), grad if product == "gemm_transposed" else lhs, weight)
    return float(np.median([call.seconds() for _ in range(REPEATS)]))
