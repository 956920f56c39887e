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

from pallas_kernels.grouped_gemm_epilogue import OPERAND, SWIZZLE, await_last, keep_rows, store_rows, store_tile
from pallas_kernels.grouped_gemm_tiles import OCTET, Tiles, fit_columns, group_steps, row_tiles

COMPUTE_WARPGROUPS = 2
_MEMORY_WARPGROUP = COMPUTE_WARPGROUPS
_MEMORY_REGISTERS, _COMPUTE_REGISTERS = 40, 232  # a thread; 40 + 2 * 232 = 3 * 168 = what 384 threads may hold
_WGMMA_ROWS = 64

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
    rows, depth = lhs_RD.shape
    num_groups, width = rhs.shape[0], rhs.shape[1 if transpose_rhs else 2]
    tiles = fit_columns(tiles, width, at_least=SWIZZLE)
    schedule = row_tiles(group_sizes_E, rows, tiles.rows)
    column_tiles, steps = pl.cdiv(width, tiles.columns), pl.cdiv(depth, tiles.depth)

    def kernel(groups, octets, begins, ends, total, lhs, rhs, out, lhs_smem, rhs_smem, whole, part, loaded, consumed):
        warpgroup = lax.axis_index("warpgroup")

        def for_each_tile(body: Callable[[Array, Array, Array, Array, Array], None]) -> Array:
            """Returns the steps of all tiles together."""
            loop_over = plgpu.nd_loop((total[0] * column_tiles,), collective_axes="sm", init_carry=jnp.int32(0))

            def tile(loop: plgpu.NDLoopInfo, carry: Array) -> Array:
                slot, column = plgpu.planar_snake(loop.index[0], (total[0], column_tiles), 0, tiles.panel)
                tile_steps = jnp.where(groups[slot] < num_groups, jnp.int32(steps), jnp.int32(0))
                start = octets[slot] * OCTET
                body(slot, start, column * tiles.columns, tile_steps, carry)
                return carry + tile_steps

            return loop_over(tile)

        @pl.when(warpgroup == _MEMORY_WARPGROUP)
        def _load() -> None:
            plgpu.set_max_registers(_MEMORY_REGISTERS, action="decrease")

            def tile(slot, start, column, tile_steps, done):
                group = groups[slot]

                def step(k, _):
                    stage = lax.rem(done + k, jnp.int32(tiles.stages))
                    pl.when(done + k >= tiles.stages)(lambda: plgpu.barrier_wait(consumed.at[stage]))
                    in_depth = pl.ds(k * tiles.depth, tiles.depth)
                    in_width = pl.ds(column, tiles.columns)
                    from_rhs = (group, in_width, in_depth) if transpose_rhs else (group, in_depth, in_width)
                    from_lhs = (pl.ds(start, tiles.rows), in_depth)
                    plgpu.copy_gmem_to_smem(lhs.at[from_lhs], lhs_smem.at[stage], loaded.at[stage])
                    plgpu.copy_gmem_to_smem(rhs.at[from_rhs], rhs_smem.at[stage], loaded.at[stage])

                lax.fori_loop(0, tile_steps, step, None)

            await_last(consumed, for_each_tile(tile), tiles.stages)

        @pl.when(warpgroup < COMPUTE_WARPGROUPS)
        def _compute() -> None:
            plgpu.set_max_registers(_COMPUTE_REGISTERS, action="increase")
            own_rows = tiles.rows // COMPUTE_WARPGROUPS
            own = warpgroup * own_rows

            def tile(slot, start, column, tile_steps, done):
                def multiply(stage: Array, step: Array, acc: Any) -> None:
                    del step
                    right = rhs_smem.at[stage]
                    left = lhs_smem.at[stage, pl.ds(own, own_rows)]
                    plgpu.wgmma(acc, left, right.transpose((1, 0)) if transpose_rhs else right)

                acc = _accumulate((own_rows, tiles.columns), multiply, loaded, consumed, done, tile_steps, tiles.stages)
                own_start = start + own
                begin, end = begins[slot] - own_start, ends[slot] - own_start
                stores = whole.at[warpgroup], part.at[warpgroup]
                store_rows(_columns(acc), tiles.columns, out, own_start, begin, end, column, *stores)

            for_each_tile(tile)
            plgpu.wait_smem_to_gmem(0)

    own_rows = tiles.rows // COMPUTE_WARPGROUPS
    right_shape = (tiles.columns, tiles.depth) if transpose_rhs else (tiles.depth, tiles.columns)
    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((rows, width), lhs_RD.dtype),
        scratch_types=[
            plgpu.SMEM((tiles.stages, tiles.rows, tiles.depth), lhs_RD.dtype, transforms=OPERAND),
            plgpu.SMEM((tiles.stages, *right_shape), lhs_RD.dtype, transforms=OPERAND),
            plgpu.SMEM((COMPUTE_WARPGROUPS, own_rows, SWIZZLE), lhs_RD.dtype, transforms=OPERAND),
            plgpu.SMEM((COMPUTE_WARPGROUPS, own_rows, SWIZZLE), lhs_RD.dtype),
            *_ring_barriers(tiles.stages),
        ],
        kernel_name="grouped_gemm_transposed_hopper" if transpose_rhs else "grouped_gemm_hopper",
        interpret=interpret,
        **_launch(num_sms),
    )(*schedule, lhs_RD, rhs)


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

        def for_each_tile(body: Callable[[Array, Array, Array, Array, Array], None]) -> Array:
            """Returns the steps of all tiles together."""
            grid = (num_groups, row_blocks * column_tiles)

            loop_over = plgpu.nd_loop(grid, collective_axes="sm", init_carry=jnp.int32(0))

            def tile(loop: plgpu.NDLoopInfo, carry: Array) -> Array:
                group, tile = loop.index
                block, column = plgpu.planar_snake(tile, (row_blocks, column_tiles), 0, tiles.panel)
                row = block * tiles.rows
                body(group, row, column * tiles.columns, steps[group], carry)
                return carry + steps[group]

            return loop_over(tile)

        @pl.when(warpgroup == _MEMORY_WARPGROUP)
        def _load() -> None:
            plgpu.set_max_registers(_MEMORY_REGISTERS, action="decrease")

            def tile(group, row, column, tile_steps, done):
                start = octets[group] * OCTET

                def step(k, _):
                    stage = lax.rem(done + k, jnp.int32(tiles.stages))
                    pl.when(done + k >= tiles.stages)(lambda: plgpu.barrier_wait(consumed.at[stage]))
                    contracted = pl.ds(start + k * tiles.depth, tiles.depth)
                    plgpu.copy_gmem_to_smem(
                        lhs.at[contracted, pl.ds(row, tiles.rows)], lhs_smem.at[stage], loaded.at[stage]
                    )
                    plgpu.copy_gmem_to_smem(
                        grad.at[contracted, pl.ds(column, tiles.columns)], grad_smem.at[stage], loaded.at[stage]
                    )

                lax.fori_loop(0, tile_steps, step, None)

            await_last(consumed, for_each_tile(tile), tiles.stages)

        @pl.when(warpgroup < COMPUTE_WARPGROUPS)
        def _compute() -> None:
            plgpu.set_max_registers(_COMPUTE_REGISTERS, action="increase")
            own = warpgroup * own_rows

            def tile(group, row, column, tile_steps, done):
                def multiply(stage: Array, step: Array, acc: Any) -> None:
                    left = lhs_smem.at[stage, :, pl.ds(own, own_rows)]
                    step_start = octets[group] * OCTET + step * tiles.depth
                    begin, end = begins[group] - step_start, ends[group] - step_start

                    @pl.when((begin > 0) | (end < tiles.depth))
                    def _mask() -> None:
                        own_grad = pl.ds(warpgroup * own_columns, own_columns)
                        keep_rows(left, begin, end)
                        keep_rows(grad_smem.at[stage, :, own_grad], begin, end)
                        plgpu.commit_smem()
                        # Each warpgroup reads the half of `grad` that the other one has masked.
                        plgpu.barrier_arrive(masked)
                        plgpu.barrier_wait(masked)

                    plgpu.wgmma(acc, left.transpose((1, 0)), grad_smem.at[stage])

                acc = _accumulate((own_rows, tiles.columns), multiply, loaded, consumed, done, tile_steps, tiles.stages)
                store_tile(_columns(acc), tiles.columns, out.at[group], row + own, column, whole.at[warpgroup])

            for_each_tile(tile)
            plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((num_groups, depth, width), lhs_RD.dtype),
        scratch_types=[
            plgpu.SMEM((tiles.stages, tiles.depth, tiles.rows), lhs_RD.dtype, transforms=OPERAND),
            plgpu.SMEM((tiles.stages, tiles.depth, tiles.columns), lhs_RD.dtype, transforms=OPERAND),
            plgpu.SMEM((COMPUTE_WARPGROUPS, own_rows, SWIZZLE), lhs_RD.dtype, transforms=OPERAND),
            *_ring_barriers(tiles.stages),
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


def _ring_barriers(stages: int) -> list[plgpu.Barrier]:
    """`loaded`: both copies of a stage have arrived. `consumed`: both compute warpgroups are done with it."""
    return [
        plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        plgpu.Barrier(num_arrivals=COMPUTE_WARPGROUPS, num_barriers=stages),
    ]


def _accumulate(
    shape: tuple[int, int],
    multiply: Callable[[Array, Array, Any], None],
    loaded: Any,
    consumed: Any,
    done: Array,
    steps: Array,
    stages: int,
) -> Array:
    """Sum of `multiply` over the steps of a tile; one wgmma stays in flight, so a stage is given back one step late."""

    def scope(acc: Any) -> Array:
        def give_back(step: Array) -> None:
            plgpu.barrier_arrive(consumed.at[lax.rem(step, jnp.int32(stages))])

        def step(k: Array, _: None) -> None:
            stage = lax.rem(done + k, jnp.int32(stages))
            plgpu.barrier_wait(loaded.at[stage])
            multiply(stage, k, acc)
            plgpu.wgmma_wait(1)
            pl.when(k > 0)(functools.partial(give_back, done + k - 1))

        lax.fori_loop(0, steps, step, None)
        plgpu.wgmma_wait(0)
        pl.when(steps > 0)(functools.partial(give_back, done + steps - 1))
        return acc[...]

    return pl.run_scoped(scope, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))


def _columns(acc: Array) -> Callable[[int], Array]:
    return lambda first: acc[:, first : first + SWIZZLE]
