"""Grouped GEMM kernels for Hopper (sm_90a: H100, H200), in Pallas Mosaic GPU: bf16 in and out, fp32 sums by wgmma.

    GMEM --TMA, one memory warpgroup--> ring of SMEM stages --wgmma, two compute warpgroups--> registers --> GMEM

A persistent grid, one block per SM. The memory warpgroup walks the same list of tiles as the compute warpgroups and
runs ahead of them by up to `stages` steps, over the end of a tile: while one tile's result is stored, the next one's
operands are under way. The compute warpgroups share the right operand of a stage and take half of the left one each.

Ragged groups: a tile starts at its group's first row, rounded down to a multiple of 8, and reads on into the groups
beside it, or past the end, where that yields rows that are never stored. Where rows are contracted (the weight
gradient), both operands of a group's first and last step are masked in SMEM by a select: rows of others may hold NaN.
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

COMPUTE_WARPGROUPS = 2
_MEMORY_WARPGROUP = COMPUTE_WARPGROUPS
_MEMORY_REGISTERS, _COMPUTE_REGISTERS = 40, 232  # a thread; 40 + 2 * 232 = 3 * 168 = what 384 threads may hold

GEMM_TILES = Tiles(rows=128, columns=256, depth=64, stages=4)
WEIGHT_GRAD_TILES = Tiles(rows=128, columns=256, depth=64, stages=4)


def grouped_gemm_hopper(
    lhs_RD: Array,
    rhs: Array,
    group_sizes_E: Array,
    *,
    transpose_rhs: bool,
    num_sms: int,
    tiles: Tiles = GEMM_TILES,
    interpret: Any = None,
) -> Array:
    """`grouped_gemm` on Hopper; rhs is [E, D, F], or [E, F, D] if `transpose_rhs`, where it is read K-major in place.

    bfloat16; D and F multiples of 64, R of 8 (TMA sees arrays in swizzled tiles of 8 x 64). Checked by the caller.
    """
    shape = product(lhs_RD, rhs, transpose_rhs=transpose_rhs, parts=1, tiles=tiles)
    name = "grouped_gemm_transposed_hopper" if transpose_rhs else "grouped_gemm_hopper"
    widths = (shape.width,)
    return _forward(lhs_RD, rhs, group_sizes_E, shape, widths, name, num_sms, interpret, transpose_rhs)[0]


def grouped_swiglu_hopper(
    lhs_RD: Array,
    rhs: Array,
    group_sizes_E: Array,
    *,
    keep: bool,
    num_sms: int,
    tiles: Tiles = GEMM_TILES,
    interpret: Any = None,
) -> tuple[Array, ...]:
    """`grouped_swiglu` on Hopper; rhs is [E, D, 2F], up before gate. Returns hidden [R, F], and up_gate if `keep`.

    A tile is 128 columns of up and the 128 of gate that belong to them, in two accumulators of one warpgroup.
    """
    shape = product(lhs_RD, rhs, transpose_rhs=False, parts=2, tiles=tiles)
    widths = (shape.width, 2 * shape.width) if keep else (shape.width,)
    return _forward(lhs_RD, rhs, group_sizes_E, shape, widths, "grouped_swiglu_hopper", num_sms, interpret, False)


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
    own_rows = tiles.rows // COMPUTE_WARPGROUPS

    def kernel(groups, octets, begins, ends, total, lhs, rhs, *refs):
        outs, (lhs_smem, rhs_smem, whole, part, loaded, consumed) = refs[: len(widths)], refs[len(widths) :]
        schedule = RowTiles(groups, octets, begins, ends, total)
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup == _MEMORY_WARPGROUP)
        def _load() -> None:
            plgpu.set_max_registers(_MEMORY_REGISTERS, action="decrease")

            def load(tile: Tile) -> None:
                group = groups[tile.index]

                def step(k, _):
                    stage = lax.rem(tile.done + k, jnp.int32(tiles.stages))
                    pl.when(tile.done + k >= tiles.stages)(lambda: plgpu.barrier_wait(consumed.at[stage]))
                    in_depth = pl.ds(k * tiles.depth, tiles.depth)
                    from_lhs = (pl.ds(tile.row, tiles.rows), in_depth)
                    plgpu.copy_gmem_to_smem(lhs.at[from_lhs], lhs_smem.at[stage], loaded.at[stage])
                    for n in range(parts):
                        in_width = pl.ds(n * shape.width + tile.column, part_columns)
                        from_rhs = (group, in_width, in_depth) if transpose_rhs else (group, in_depth, in_width)
                        plgpu.copy_gmem_to_smem(rhs.at[from_rhs], rhs_smem.at[stage, n], loaded.at[stage])

                lax.fori_loop(0, tile.steps, step, None)

            await_last(consumed, walk_rows(schedule, shape, load)[0], tiles.stages)

        @pl.when(warpgroup < COMPUTE_WARPGROUPS)
        def _compute() -> None:
            plgpu.set_max_registers(_COMPUTE_REGISTERS, action="increase")
            own = warpgroup * own_rows

            def compute(tile: Tile) -> None:
                def multiply(stage: Array, step: Array, accs: tuple[Any, ...]) -> None:
                    del step
                    left = lhs_smem.at[stage, pl.ds(own, own_rows)]
                    for n, acc in enumerate(accs):
                        right = rhs_smem.at[stage, n]
                        plgpu.wgmma(acc, left, right.transpose((1, 0)) if transpose_rhs else right)

                sums = _accumulate((own_rows, part_columns), parts, multiply, loaded, consumed, tile, tiles.stages)
                row = tile.row + own
                place = (row, begins[tile.index] - row, ends[tile.index] - row, tile.column)
                stores = whole.at[warpgroup], part.at[warpgroup]
                if parts == 1:
                    store_rows(_columns(sums[0]), part_columns, outs[0], *place, *stores)
                else:
                    # Rounded at once: 128 registers of sums become 64. Else keeping up and gate spilled 1,992 bytes.
                    up, gate = (_columns(x.astype(lhs_RD.dtype)) for x in sums)
                    store_gated(up, gate, part_columns, outs, *place, *stores)

            walk_rows(schedule, shape, compute)
            plgpu.wait_smem_to_gmem(0)

    right_shape = (part_columns, tiles.depth) if transpose_rhs else (tiles.depth, part_columns)
    return plgpu.kernel(
        kernel,
        out_type=[jax.ShapeDtypeStruct((shape.rows, width), lhs_RD.dtype) for width in widths],
        scratch_types=[
            plgpu.SMEM((tiles.stages, tiles.rows, tiles.depth), lhs_RD.dtype, transforms=OPERAND),
            plgpu.SMEM((tiles.stages, parts, *right_shape), lhs_RD.dtype, transforms=OPERAND),
            plgpu.SMEM((COMPUTE_WARPGROUPS, own_rows, SWIZZLE), lhs_RD.dtype, transforms=OPERAND),
            plgpu.SMEM((COMPUTE_WARPGROUPS, own_rows, SWIZZLE), lhs_RD.dtype),
            *_ring_barriers(tiles.stages, copies=1 + parts),
        ],
        kernel_name=name,
        interpret=interpret,
        **_launch(num_sms),
    )(*row_tiles(group_sizes_E, shape.rows, tiles.rows), lhs_RD, rhs)


def grouped_gemm_weight_grad_hopper(
    lhs_RD: Array,
    grad_RF: Array,
    group_sizes_E: Array,
    *,
    num_sms: int,
    tiles: Tiles = WEIGHT_GRAD_TILES,
    interpret: Any = None,
) -> Array:
    """`grouped_gemm_weight_grad` on Hopper: [E, D, F]; conditions as in the forward kernel.

    `tiles.rows` counts columns of lhs here (rows of the result), `tiles.depth` the rows contracted in a step.
    """
    rows, depth = lhs_RD.shape
    width, num_groups = grad_RF.shape[1], group_sizes_E.shape[0]
    tiles = fit_columns(tiles, width, at_least=COMPUTE_WARPGROUPS * SWIZZLE)
    row_blocks, column_tiles = pl.cdiv(depth, tiles.rows), pl.cdiv(width, tiles.columns)
    schedule = group_steps(group_sizes_E, rows, tiles.depth)
    own_rows, own_columns = tiles.rows // COMPUTE_WARPGROUPS, tiles.columns // COMPUTE_WARPGROUPS

    def kernel(octets, begins, ends, steps, lhs, grad, out, lhs_smem, grad_smem, whole, loaded, consumed, masked):
        warpgroup = lax.axis_index("warpgroup")
        groups = GroupSteps(octets, begins, ends, steps)
        walk = functools.partial(walk_groups, groups, num_groups, row_blocks, column_tiles, tiles)

        @pl.when(warpgroup == _MEMORY_WARPGROUP)
        def _load() -> None:
            plgpu.set_max_registers(_MEMORY_REGISTERS, action="decrease")

            def load(tile: Tile) -> None:
                start = octets[tile.index] * OCTET

                def step(k, _):
                    stage = lax.rem(tile.done + k, jnp.int32(tiles.stages))
                    pl.when(tile.done + k >= tiles.stages)(lambda: plgpu.barrier_wait(consumed.at[stage]))
                    contracted = pl.ds(start + k * tiles.depth, tiles.depth)
                    from_lhs, from_grad = pl.ds(tile.row, tiles.rows), pl.ds(tile.column, tiles.columns)
                    plgpu.copy_gmem_to_smem(lhs.at[contracted, from_lhs], lhs_smem.at[stage], loaded.at[stage])
                    plgpu.copy_gmem_to_smem(grad.at[contracted, from_grad], grad_smem.at[stage], loaded.at[stage])

                lax.fori_loop(0, tile.steps, step, None)

            await_last(consumed, walk(load)[0], tiles.stages)

        @pl.when(warpgroup < COMPUTE_WARPGROUPS)
        def _compute() -> None:
            plgpu.set_max_registers(_COMPUTE_REGISTERS, action="increase")
            own = warpgroup * own_rows

            def compute(tile: Tile) -> None:
                def multiply(stage: Array, step: Array, accs: tuple[Any, ...]) -> None:
                    left = lhs_smem.at[stage, :, pl.ds(own, own_rows)]
                    step_start = octets[tile.index] * OCTET + step * tiles.depth
                    begin, end = begins[tile.index] - step_start, ends[tile.index] - step_start

                    @pl.when((begin > 0) | (end < tiles.depth))
                    def _mask() -> None:
                        own_grad = pl.ds(warpgroup * own_columns, own_columns)
                        keep_rows(left, begin, end)
                        keep_rows(grad_smem.at[stage, :, own_grad], begin, end)
                        plgpu.commit_smem()
                        # Each warpgroup reads the half of `grad` that the other one has masked.
                        plgpu.barrier_arrive(masked)
                        plgpu.barrier_wait(masked)

                    plgpu.wgmma(accs[0], left.transpose((1, 0)), grad_smem.at[stage])

                (acc,) = _accumulate((own_rows, tiles.columns), 1, multiply, loaded, consumed, tile, tiles.stages)
                place = tile.row + own, tile.column
                store_tile(_columns(acc), tiles.columns, out.at[tile.index], *place, whole.at[warpgroup])

            walk(compute)
            plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((num_groups, depth, width), lhs_RD.dtype),
        scratch_types=[
            plgpu.SMEM((tiles.stages, tiles.depth, tiles.rows), lhs_RD.dtype, transforms=OPERAND),
            plgpu.SMEM((tiles.stages, tiles.depth, tiles.columns), lhs_RD.dtype, transforms=OPERAND),
            plgpu.SMEM((COMPUTE_WARPGROUPS, own_rows, SWIZZLE), lhs_RD.dtype, transforms=OPERAND),
            *_ring_barriers(tiles.stages, copies=2),
            plgpu.Barrier(num_arrivals=COMPUTE_WARPGROUPS),
        ],
        kernel_name="grouped_gemm_weight_grad_hopper",
        interpret=interpret,
        **_launch(num_sms),
    )(*schedule, lhs_RD, grad_RF)


def _launch(num_sms: int) -> dict[str, Any]:
    return dict(
        grid=(num_sms,),
        grid_names=("sm",),
        num_threads=COMPUTE_WARPGROUPS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )


def _ring_barriers(stages: int, copies: int) -> list[plgpu.Barrier]:
    """`loaded`: all copies of a stage have arrived. `consumed`: both compute warpgroups are done with it."""
    return [
        plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
        plgpu.Barrier(num_arrivals=COMPUTE_WARPGROUPS, num_barriers=stages),
    ]


def _accumulate(
    shape: tuple[int, int],
    parts: int,
    multiply: Callable[[Array, Array, tuple[Any, ...]], None],
    loaded: Any,
    consumed: Any,
    tile: Tile,
    stages: int,
) -> tuple[Array, ...]:
    """Sums of `multiply` over the steps of a tile, one of `shape` per part.

    `multiply` issues a wgmma per part; those of one step stay in flight, so a stage is given back one step late.
    """

    def scope(*accs: Any) -> tuple[Array, ...]:
        def give_back(step: Array) -> None:
            plgpu.barrier_arrive(consumed.at[lax.rem(step, jnp.int32(stages))])

        def step(k: Array, _: None) -> None:
            stage = lax.rem(tile.done + k, jnp.int32(stages))
            plgpu.barrier_wait(loaded.at[stage])
            multiply(stage, k, accs)
            plgpu.wgmma_wait(parts)
            pl.when(k > 0)(functools.partial(give_back, tile.done + k - 1))

        lax.fori_loop(0, tile.steps, step, None)
        plgpu.wgmma_wait(0)
        pl.when(tile.steps > 0)(functools.partial(give_back, tile.done + tile.steps - 1))
        return tuple(acc[...] for acc in accs)

    return pl.run_scoped(scope, *[plgpu.WGMMAAccumulatorRef(shape, jnp.float32) for _ in range(parts)])


def _columns(acc: Array) -> Callable[[int], Array]:
    return lambda first: acc[:, first : first + SWIZZLE]
