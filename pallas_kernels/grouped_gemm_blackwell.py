"""Grouped GEMM kernels for Blackwell (sm_100a, sm_103a: B200, B300), in Pallas Mosaic GPU: bf16, fp32 sums by tcgen05.

    GMEM --TMA, a warp--> ring of SMEM stages --tcgen05.mma, a warp--> two accumulators in TMEM --a warpgroup--> GMEM

A persistent grid, one block per SM. The three roles walk the same list of tiles at their own pace: loads run ahead by
up to `stages` steps, and while one accumulator is stored the tensor core fills the other. Tiles, ragged edges and the
rows past the last group are as on Hopper (grouped_gemm_hopper.py); masking for the weight gradient, which there is the
compute warpgroups' work, is a fourth role here: the MMA warp hands over a stage and gets it back masked.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped_gemm_epilogue import (
    OPERAND,
    SWIZZLE,
    await_last,
    keep_rows,
    store_gated,
    store_rows,
    store_tile,
)
from pallas_kernels.grouped_gemm_tiles import OCTET, GroupSteps, RowTiles, Tiles, fit_columns, group_steps, row_tiles
from pallas_kernels.grouped_gemm_walk import Product, Tile, product, walk_groups, walk_rows

_DRIVE, _STORE, _MASK = 0, 1, 2  # warpgroups
_TMA_WARP, _MMA_WARP = 0, 1  # warps of the first one
_ACCUMULATORS = 2

GEMM_TILES = Tiles(rows=128, columns=256, depth=64, stages=4)
WEIGHT_GRAD_TILES = Tiles(rows=128, columns=256, depth=64, stages=4)


def grouped_gemm_blackwell(
    lhs_RD: Array,
    rhs: Array,
    group_sizes_E: Array,
    *,
    transpose_rhs: bool,
    num_sms: int,
    tiles: Tiles = GEMM_TILES,
    interpret: Any = None,
) -> Array:
    """`grouped_gemm` on Blackwell; rhs is [E, D, F], or [E, F, D] if `transpose_rhs`, read K-major in place.

    bfloat16; D and F multiples of 64, R of 8 (TMA sees arrays in swizzled tiles of 8 x 64). Checked by the caller.
    """
    shape = product(lhs_RD, rhs, transpose_rhs=transpose_rhs, parts=1, tiles=tiles)
    name = "grouped_gemm_transposed_blackwell" if transpose_rhs else "grouped_gemm_blackwell"
    widths = (shape.width,)
    return _forward(lhs_RD, rhs, group_sizes_E, shape, widths, name, num_sms, interpret, transpose_rhs)[0]


def grouped_swiglu_blackwell(
    lhs_RD: Array,
    rhs: Array,
    group_sizes_E: Array,
    *,
    keep: bool,
    num_sms: int,
    tiles: Tiles = GEMM_TILES,
    interpret: Any = None,
) -> tuple[Array, ...]:
    """`grouped_swiglu` on Blackwell; rhs is [E, D, 2F], up before gate. Returns hidden [R, F], and up_gate if `keep`.

    A tile is 128 columns of up and the 128 of gate that belong to them, the two halves of one accumulator.
    """
    shape = product(lhs_RD, rhs, transpose_rhs=False, parts=2, tiles=tiles)
    widths = (shape.width, 2 * shape.width) if keep else (shape.width,)
    return _forward(lhs_RD, rhs, group_sizes_E, shape, widths, "grouped_swiglu_blackwell", num_sms, interpret, False)


def _forward(
    lhs_RD: Array,
    rhs: Array,
    group_sizes_E: Array,
    shape: Product,
    widths: tuple[int, ...],
    name: str,
    num_sms: int,
    interpret: Any,
    transpose_rhs: bool,
) -> tuple[Array, ...]:
    """Results [R, width] each: the product, or what `store_gated` makes of two parts."""
    tiles, parts, part_columns = shape.tiles, shape.parts, shape.part_columns

    def kernel(groups, octets, begins, ends, total, lhs, rhs, *refs):
        outs, (lhs_smem, rhs_smem, acc, whole, part, *barriers) = refs[: len(widths)], refs[len(widths) :]
        loaded, consumed, multiplied, stored = barriers
        schedule = RowTiles(groups, octets, begins, ends, total)
        walk = functools.partial(walk_rows, schedule, shape)
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup == _DRIVE)
        def _() -> None:
            def load(tile: Tile) -> None:
                group = groups[tile.index]

                def copies(k: Array) -> list[tuple[Any, Any]]:
                    in_depth = pl.ds(k * tiles.depth, tiles.depth)
                    pairs = [(lhs.at[pl.ds(tile.row, tiles.rows), in_depth], lambda stage: lhs_smem.at[stage])]
                    for n in range(parts):
                        in_width = pl.ds(n * shape.width + tile.column, part_columns)
                        from_rhs = (group, in_width, in_depth) if transpose_rhs else (group, in_depth, in_width)
                        pairs.append((rhs.at[from_rhs], lambda stage, n=n: rhs_smem.at[stage, n]))
                    return pairs

                _load_steps(copies, loaded, consumed, tile, tiles.stages)

            def multiply(tile: Tile) -> None:
                def operands(stage: Array, step: Array) -> list[tuple[Any, Any]]:
                    del step
                    rights = [rhs_smem.at[stage, n] for n in range(parts)]
                    return [(lhs_smem.at[stage], x.transpose((1, 0)) if transpose_rhs else x) for x in rights]

                _multiply_steps(operands, acc, barriers, tile, tiles)

            _in_two_warps(load, multiply, walk, consumed, stored, tiles.stages)

        @pl.when(warpgroup == _STORE)
        def _() -> None:
            def store(tile: Tile) -> None:
                place = (tile.row, begins[tile.index] - tile.row, ends[tile.index] - tile.row, tile.column)

                def from_columns(read: Callable[[int], Array]) -> None:
                    if parts == 1:
                        store_rows(read, part_columns, outs[0], *place, whole, part)
                    else:
                        gate = lambda first: read(part_columns + first)  # noqa: E731
                        store_gated(read, gate, part_columns, outs, *place, whole, part)

                _store_accumulator(from_columns, acc, multiplied, stored, tile, tiles)

            walk(store)
            plgpu.wait_smem_to_gmem(0)

    right_shape = (part_columns, tiles.depth) if transpose_rhs else (tiles.depth, part_columns)
    return plgpu.kernel(
        kernel,
        out_type=[jax.ShapeDtypeStruct((shape.rows, width), lhs_RD.dtype) for width in widths],
        scratch_types=[
            plgpu.SMEM((tiles.stages, tiles.rows, tiles.depth), lhs_RD.dtype, transforms=OPERAND),
            plgpu.SMEM((tiles.stages, parts, *right_shape), lhs_RD.dtype, transforms=OPERAND),
            plgpu.TMEM((tiles.rows, _ACCUMULATORS * tiles.columns), jnp.float32),
            plgpu.SMEM((tiles.rows, SWIZZLE), lhs_RD.dtype, transforms=OPERAND),
            plgpu.SMEM((tiles.rows, SWIZZLE), lhs_RD.dtype),
            *_barriers(tiles.stages, parts),
        ],
        kernel_name=name,
        interpret=interpret,
        **_launch(num_sms, warpgroups=2),
    )(*row_tiles(group_sizes_E, shape.rows, tiles.rows), lhs_RD, rhs)


def grouped_gemm_weight_grad_blackwell(
    lhs_RD: Array,
    grad_RF: Array,
    group_sizes_E: Array,
    *,
    num_sms: int,
    tiles: Tiles = WEIGHT_GRAD_TILES,
    interpret: Any = None,
) -> Array:
    """`grouped_gemm_weight_grad` on Blackwell: [E, D, F]; conditions as in the forward kernel.

    `tiles.rows` counts columns of lhs here (rows of the result), `tiles.depth` the rows contracted in a step.
    """
    rows, depth = lhs_RD.shape
    width, num_groups = grad_RF.shape[1], group_sizes_E.shape[0]
    tiles = fit_columns(tiles, width, at_least=SWIZZLE)
    row_blocks, column_tiles = pl.cdiv(depth, tiles.rows), pl.cdiv(width, tiles.columns)
    schedule = group_steps(group_sizes_E, rows, tiles.depth)

    def kernel(octets, begins, ends, steps, lhs, grad, out, lhs_smem, grad_smem, acc, whole, handed, masked, *barriers):
        loaded, consumed, multiplied, stored = barriers
        warpgroup = lax.axis_index("warpgroup")
        groups = GroupSteps(octets, begins, ends, steps)
        walk = functools.partial(walk_groups, groups, num_groups, row_blocks, column_tiles, tiles)

        def foreign_rows(group: Array, step: Array) -> tuple[Array, Array, Array]:
            """Whether a step holds rows of other groups, and the range of its rows that are this group's."""
            step_start = octets[group] * OCTET + step * tiles.depth
            begin, end = begins[group] - step_start, ends[group] - step_start
            return (begin > 0) | (end < tiles.depth), begin, end

        @pl.when(warpgroup == _DRIVE)
        def _() -> None:
            def load(tile: Tile) -> None:
                start = octets[tile.index] * OCTET

                def copies(k: Array) -> list[tuple[Any, Any]]:
                    contracted = pl.ds(start + k * tiles.depth, tiles.depth)
                    from_lhs, from_grad = pl.ds(tile.row, tiles.rows), pl.ds(tile.column, tiles.columns)
                    return [
                        (lhs.at[contracted, from_lhs], lambda stage: lhs_smem.at[stage]),
                        (grad.at[contracted, from_grad], lambda stage: grad_smem.at[stage]),
                    ]

                _load_steps(copies, loaded, consumed, tile, tiles.stages)

            def multiply(tile: Tile) -> None:
                def operands(stage: Array, step: Array) -> list[tuple[Any, Any]]:
                    @pl.when(foreign_rows(tile.index, step)[0])
                    def _() -> None:
                        plgpu.barrier_arrive(handed)
                        plgpu.barrier_wait(masked)

                    return [(lhs_smem.at[stage].transpose((1, 0)), grad_smem.at[stage])]

                _multiply_steps(operands, acc, barriers, tile, tiles)

            _in_two_warps(load, multiply, walk, consumed, stored, tiles.stages)

        @pl.when(warpgroup == _STORE)
        def _() -> None:
            def store(tile: Tile) -> None:
                def from_columns(read: Callable[[int], Array]) -> None:
                    store_tile(read, tiles.columns, out.at[tile.index], tile.row, tile.column, whole)

                _store_accumulator(from_columns, acc, multiplied, stored, tile, tiles)

            walk(store)
            plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup == _MASK)
        def _() -> None:
            def mask(tile: Tile) -> None:
                def mask_step(step: Array) -> None:
                    foreign, begin, end = foreign_rows(tile.index, step)

                    @pl.when(foreign)
                    def _() -> None:
                        stage = lax.rem(tile.done + step, jnp.int32(tiles.stages))
                        plgpu.barrier_wait(handed)
                        keep_rows(lhs_smem.at[stage], begin, end)
                        keep_rows(grad_smem.at[stage], begin, end)
                        plgpu.commit_smem()
                        plgpu.barrier_arrive(masked)

                # Only the first and the last step of a group can hold rows of others.
                pl.when(tile.steps > 0)(functools.partial(mask_step, jnp.int32(0)))
                pl.when(tile.steps > 1)(functools.partial(mask_step, tile.steps - 1))

            walk(mask)

    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((num_groups, depth, width), lhs_RD.dtype),
        scratch_types=[
            plgpu.SMEM((tiles.stages, tiles.depth, tiles.rows), lhs_RD.dtype, transforms=OPERAND),
            plgpu.SMEM((tiles.stages, tiles.depth, tiles.columns), lhs_RD.dtype, transforms=OPERAND),
            plgpu.TMEM((tiles.rows, _ACCUMULATORS * tiles.columns), jnp.float32),
            plgpu.SMEM((tiles.rows, SWIZZLE), lhs_RD.dtype, transforms=OPERAND),
            plgpu.Barrier(),
            plgpu.Barrier(),
            *_barriers(tiles.stages, parts=1),
        ],
        kernel_name="grouped_gemm_weight_grad_blackwell",
        interpret=interpret,
        **_launch(num_sms, warpgroups=3),
    )(*schedule, lhs_RD, grad_RF)


def _launch(num_sms: int, warpgroups: int) -> dict[str, Any]:
    return dict(
        grid=(num_sms,),
        grid_names=("sm",),
        num_threads=warpgroups,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )


def _barriers(stages: int, parts: int) -> list[plgpu.Barrier]:
    """loaded, consumed: per stage, by the copies and by the tensor core. multiplied, stored: per accumulator."""
    return [
        plgpu.Barrier(num_arrivals=1 + parts, num_barriers=stages),
        plgpu.Barrier(num_arrivals=parts, num_barriers=stages, orders_tensor_core=True),
        plgpu.Barrier(num_barriers=_ACCUMULATORS, orders_tensor_core=True),
        plgpu.Barrier(num_barriers=_ACCUMULATORS, orders_tensor_core=True),
    ]


def _in_two_warps(
    load: Callable[[Tile], None],
    multiply: Callable[[Tile], None],
    walk: Callable[[Callable[[Tile], None]], tuple[Array, Array]],
    consumed: Any,
    stored: Any,
    stages: int,
) -> None:
    @plgpu.warp_map
    def _(warp: Array) -> None:
        @pl.when(warp == _TMA_WARP)
        def _() -> None:
            done, _ = walk(load)
            await_last(consumed, done, stages)

        @pl.when(warp == _MMA_WARP)
        def _() -> None:
            _, used = walk(multiply)
            await_last(stored, used, _ACCUMULATORS)


def _load_steps(
    copies: Callable[[Array], list[tuple[Any, Any]]], loaded: Any, consumed: Any, tile: Tile, stages: int
) -> None:
    """copies(step): pairs of a slice of GMEM and a function from a stage to the SMEM it goes to."""

    def step(k: Array, _: None) -> None:
        stage = lax.rem(tile.done + k, jnp.int32(stages))
        pl.when(tile.done + k >= stages)(lambda: plgpu.barrier_wait(consumed.at[stage]))
        for source, destination in copies(k):
            plgpu.copy_gmem_to_smem(source, destination(stage), loaded.at[stage])

    lax.fori_loop(0, tile.steps, step, None)


def _multiply_steps(
    operands: Callable[[Array, Array], list[tuple[Any, Any]]], acc: Any, barriers: Any, tile: Tile, tiles: Tiles
) -> None:
    """operands(stage, step): a pair per part of the accumulator, side by side in its columns."""
    loaded, consumed, multiplied, stored = barriers
    accumulator = lax.rem(tile.used, jnp.int32(_ACCUMULATORS))

    @pl.when((tile.steps > 0) & (tile.used >= _ACCUMULATORS))
    def _() -> None:
        plgpu.barrier_wait(stored.at[accumulator])

    def step(k: Array, _: None) -> None:
        stage = lax.rem(tile.done + k, jnp.int32(tiles.stages))
        plgpu.barrier_wait(loaded.at[stage])
        pairs = operands(stage, k)
        columns = tiles.columns // len(pairs)
        for n, pair in enumerate(pairs):
            here = acc.at[:, pl.ds(accumulator * tiles.columns + n * columns, columns)]
            plgpu.tcgen05_mma(here, *pair, consumed.at[stage], accumulate=k > 0)

    lax.fori_loop(0, tile.steps, step, None)
    pl.when(tile.steps > 0)(lambda: plgpu.tcgen05_commit_arrive(multiplied.at[accumulator]))


def _store_accumulator(
    store: Callable[[Callable[[int], Array]], None],
    acc: Any,
    multiplied: Any,
    stored: Any,
    tile: Tile,
    tiles: Tiles,
) -> None:
    """`store` what the tensor core has summed, and give the accumulator back; a tile without steps is 0."""
    accumulator = lax.rem(tile.used, jnp.int32(_ACCUMULATORS))

    def read(first: int) -> Array:
        columns = pl.ds(accumulator * tiles.columns + first, SWIZZLE)
        return plgpu.async_load_tmem(acc.at[:, columns], layout=plgpu.Layout.TCGEN05)

    @pl.when(tile.steps > 0)
    def _() -> None:
        plgpu.barrier_wait(multiplied.at[accumulator])
        store(read)
        plgpu.wait_load_tmem()  # given back, the accumulator may be overwritten at once
        plgpu.barrier_arrive(stored.at[accumulator])

    @pl.when(tile.steps == 0)
    def _() -> None:
        store(lambda first: jnp.zeros((tiles.rows, SWIZZLE), jnp.float32))
