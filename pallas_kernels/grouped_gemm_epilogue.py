"""Ragged edges, as the GPU kernels meet them: rows that must not be stored, and rows that must not be summed.

    read(first column) --> fp32 [height, 64] --cast--> SMEM --TMA--> out[row + begin : row + end]
    SMEM operand --select--> zero outside [begin, end)

All of it runs in one warpgroup. `whole` is swizzled SMEM [height, 64] for tiles that own all their rows, `part`
plain SMEM of the same shape for the others: only plain SMEM can be cut at any row.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

SWIZZLE = 64  # bfloat16 in 128 bytes: the width of a swizzled tile, and of a copy to GMEM
OPERAND = (
    plgpu.TilingTransform((8, SWIZZLE)),  # pyright: ignore[reportAbstractUsage]
    plgpu.SwizzleTransform(128),  # pyright: ignore[reportAbstractUsage]
)


def store_rows(
    read: Callable[[int], Array],
    width: int,
    out: Any,
    row: Array,
    begin: Array,
    end: Array,
    column: Array,
    whole: Any,
    part: Any,
) -> None:
    """Rows [begin, end) of a tile to `out`, the tile's row 0 being `row` there; TMA drops columns past its width.

    A part of the height goes out as copies of 2^n rows, one per bit of its length: a TMA copy has a static shape.
    """
    height = part.shape[0]
    begin = jnp.clip(begin, 0, height)
    count = jnp.clip(end, begin, height) - begin

    @pl.when(count == height)
    def _() -> None:
        store_tile(read, width, out, row, column, whole)

    @pl.when((count > 0) & (count < height))
    def _() -> None:
        for first in range(0, width, SWIZZLE):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            part[...] = read(first).astype(part.dtype)
            plgpu.commit_smem()
            rows = height // 2
            while rows:
                _store_bit(out, row, begin, count, column + first, rows, part)
                rows //= 2


def store_gated(
    up: Callable[[int], Array], gate: Callable[[int], Array], width: int, outs: tuple[Any, ...], *place: Any
) -> None:
    """SwiGLU of a tile to outs[0], [R, F]; if there is an outs[1], [R, 2F], up and gate to its halves.

    place: row, begin, end, column, whole, part of `store_rows`. Up and gate are rounded to the dtype of the result
    before they are multiplied, so that hidden rows recomputed from what was kept are the same to the bit.
    """
    row, begin, end, column, *stores = place
    dtype = stores[0].dtype

    def hidden(first: int) -> Array:
        up_, gate_ = (half(first).astype(dtype).astype(jnp.float32) for half in (up, gate))
        return up_ * gate_ / (1.0 + jnp.exp(-gate_))

    store_rows(hidden, width, outs[0], row, begin, end, column, *stores)
    if len(outs) > 1:
        store_rows(up, width, outs[1], row, begin, end, column, *stores)
        store_rows(gate, width, outs[1], row, begin, end, outs[0].shape[1] + column, *stores)


def _store_bit(out: Any, row: Array, begin: Array, count: Array, column: Array, rows: int, part: Any) -> None:
    """The copy of `rows` rows, if `count` has that bit; the rows before it are those of the higher bits."""

    @pl.when((count & rows) != 0)
    def _() -> None:
        at = begin + (count & (-2 * rows))
        plgpu.copy_smem_to_gmem(part.at[pl.ds(at, rows)], out.at[pl.ds(row + at, rows), pl.ds(column, SWIZZLE)])


def store_tile(read: Callable[[int], Array], width: int, out: Any, row: Array, column: Array, whole: Any) -> None:
    """All rows of a tile to `out`, from (row, column) on."""
    for first in range(0, width, SWIZZLE):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        whole[...] = read(first).astype(whole.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(whole, out.at[pl.ds(row, whole.shape[0]), pl.ds(column + first, SWIZZLE)])


def keep_rows(ref: Any, begin: Array, end: Array) -> None:
    """Zero in the rows of SMEM outside [begin, end), by a select, so that NaN goes as well."""
    index = plgpu.broadcasted_iota(jnp.int32, ref.shape, 0, layout=plgpu.Layout.WGMMA)
    ref[...] = jnp.where((index >= begin) & (index < end), ref[...], jnp.zeros((), ref.dtype))


def await_last(barriers: Any, arrivals: Array, count: int) -> None:
    """At the end of a kernel: the last round of a ring of `count` barriers that has seen `arrivals` arrivals in all.

    Nobody needs these stages any more, but a barrier must not be arrived at after its block has ended.
    """

    def wait(n: Array, _: None) -> None:
        plgpu.barrier_wait(barriers.at[lax.rem(n, jnp.int32(count))])

    lax.fori_loop(jnp.maximum(arrivals - count, 0), arrivals, wait, None)
