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

from pallas_kernels.grouped_gemm_epilogue import OPERAND, SWIZZLE, await_last, keep_rows, store_rows, store_tile
from pallas_kernels.grouped_gemm_tiles import OCTET, Tiles, fit_columns, group_steps, row_tiles

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
    rows, depth = lhs_RD.shape
    num_groups, width = rhs.shape[0], rhs.shape[1 if transpose_rhs else 2]
    tiles = fit_columns(tiles, width, at_least=SWIZZLE)
    schedule = row_tiles(group_sizes_E, rows, tiles.rows)
    column_tiles, steps = pl.cdiv(width, tiles.columns), pl.cdiv(depth, tiles.depth)

    def kernel(groups, octets, begins, ends, total, lhs, rhs, out, lhs_smem, rhs_smem, acc, whole, part, *barriers):
        loaded, consumed, multiplied, stored = barriers
        warpgroup = lax.axis_index("warpgroup")

        def for_each_tile(body: Callable[..., None]) -> tuple[Array, Array]:
            """body(slot, first row, first column, steps, steps done before, accumulators used before)."""

            loop_over = plgpu.nd_loop(
                (total[0] * column_tiles,), collective_axes="sm", init_carry=(jnp.int32(0), jnp.int32(0))
            )

            def tile(loop: plgpu.NDLoopInfo, carry: tuple[Array, Array]) -> tuple[Array, Array]:
                slot, column = plgpu.planar_snake(loop.index[0], (total[0], column_tiles), 0, tiles.panel)
                tile_steps = jnp.where(groups[slot] < num_groups, jnp.int32(steps), jnp.int32(0))
                start = octets[slot] * OCTET
                body(slot, start, column * tiles.columns, tile_steps, *carry)
                return _advance(carry, tile_steps)

            return loop_over(tile)

        @pl.when(warpgroup == _DRIVE)
        def _() -> None:
            def load(slot, start, column, tile_steps, done, used):
                del used
                group = groups[slot]

                def copies(k: Array) -> list[tuple[Any, Any]]:
                    in_depth = pl.ds(k * tiles.depth, tiles.depth)
                    in_width = pl.ds(column, tiles.columns)
                    from_rhs = (group, in_width, in_depth) if transpose_rhs else (group, in_depth, in_width)
                    return [(lhs.at[pl.ds(start, tiles.rows), in_depth], lhs_smem), (rhs.at[from_rhs], rhs_smem)]

                _load_steps(copies, loaded, consumed, done, tile_steps, tiles.stages)

            def multiply(slot, start, column, tile_steps, done, used):
                del slot, start, column

                def operands(stage: Array, step: Array) -> tuple[Any, Any]:
                    del step
                    right = rhs_smem.at[stage]
                    return lhs_smem.at[stage], right.transpose((1, 0)) if transpose_rhs else right

                _multiply_steps(operands, acc, barriers, done, used, tile_steps, tiles)

            _in_two_warps(load, multiply, for_each_tile, consumed, stored, tiles.stages)

        @pl.when(warpgroup == _STORE)
        def _() -> None:
            def store(slot, start, column, tile_steps, done, used):
                del done
                begin, end = begins[slot] - start, ends[slot] - start

                def from_columns(read: Callable[[int], Array]) -> None:
                    store_rows(read, tiles.columns, out, start, begin, end, column, whole, part)

                _store_accumulator(from_columns, acc, multiplied, stored, used, tile_steps, tiles)

            for_each_tile(store)
            plgpu.wait_smem_to_gmem(0)

    right_shape = (tiles.columns, tiles.depth) if transpose_rhs else (tiles.depth, tiles.columns)
    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((rows, width), lhs_RD.dtype),
        scratch_types=[
            plgpu.SMEM((tiles.stages, tiles.rows, tiles.depth), lhs_RD.dtype, transforms=OPERAND),
            plgpu.SMEM((tiles.stages, *right_shape), lhs_RD.dtype, transforms=OPERAND),
            plgpu.TMEM((tiles.rows, _ACCUMULATORS * tiles.columns), jnp.float32),
            plgpu.SMEM((tiles.rows, SWIZZLE), lhs_RD.dtype, transforms=OPERAND),
            plgpu.SMEM((tiles.rows, SWIZZLE), lhs_RD.dtype),
            *_barriers(tiles.stages),
        ],
        kernel_name="grouped_gemm_transposed_blackwell" if transpose_rhs else "grouped_gemm_blackwell",
        interpret=interpret,
        **_launch(num_sms, warpgroups=2),
    )(*schedule, lhs_RD, rhs)


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

        def for_each_tile(body: Callable[..., None]) -> tuple[Array, Array]:
            """body(group, first row of the result, first column, steps, steps done, accumulators used before)."""
            grid, start = (num_groups, row_blocks * column_tiles), (jnp.int32(0), jnp.int32(0))

            loop_over = plgpu.nd_loop(grid, collective_axes="sm", init_carry=start)

            def tile(loop: plgpu.NDLoopInfo, carry: tuple[Array, Array]) -> tuple[Array, Array]:
                group, tile = loop.index
                block, column = plgpu.planar_snake(tile, (row_blocks, column_tiles), 0, tiles.panel)
                row = block * tiles.rows
                body(group, row, column * tiles.columns, steps[group], *carry)
                return _advance(carry, steps[group])

            return loop_over(tile)

        def foreign_rows(group: Array, step: Array) -> tuple[Array, Array, Array]:
            """Whether a step holds rows of other groups, and the range of its rows that are this group's."""
            step_start = octets[group] * OCTET + step * tiles.depth
            begin, end = begins[group] - step_start, ends[group] - step_start
            return (begin > 0) | (end < tiles.depth), begin, end

        @pl.when(warpgroup == _DRIVE)
        def _() -> None:
            def load(group, row, column, tile_steps, done, used):
                del used
                start = octets[group] * OCTET

                def copies(k: Array) -> list[tuple[Any, Any]]:
                    contracted = pl.ds(start + k * tiles.depth, tiles.depth)
                    return [
                        (lhs.at[contracted, pl.ds(row, tiles.rows)], lhs_smem),
                        (grad.at[contracted, pl.ds(column, tiles.columns)], grad_smem),
                    ]

                _load_steps(copies, loaded, consumed, done, tile_steps, tiles.stages)

            def multiply(group, row, column, tile_steps, done, used):
                del row, column

                def operands(stage: Array, step: Array) -> tuple[Any, Any]:
                    @pl.when(foreign_rows(group, step)[0])
                    def _() -> None:
                        plgpu.barrier_arrive(handed)
                        plgpu.barrier_wait(masked)

                    return lhs_smem.at[stage].transpose((1, 0)), grad_smem.at[stage]

                _multiply_steps(operands, acc, barriers, done, used, tile_steps, tiles)

            _in_two_warps(load, multiply, for_each_tile, consumed, stored, tiles.stages)

        @pl.when(warpgroup == _STORE)
        def _() -> None:
            def store(group, row, column, tile_steps, done, used):
                del done

                def from_columns(read: Callable[[int], Array]) -> None:
                    store_tile(read, tiles.columns, out.at[group], row, column, whole)

                _store_accumulator(from_columns, acc, multiplied, stored, used, tile_steps, tiles)

            for_each_tile(store)
            plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup == _MASK)
        def _() -> None:
            def mask(group, row, column, tile_steps, done, used):
                del row, column, used

                def mask_step(step: Array) -> None:
                    foreign, begin, end = foreign_rows(group, step)

                    @pl.when(foreign)
                    def _() -> None:
                        stage = lax.rem(done + step, jnp.int32(tiles.stages))
                        plgpu.barrier_wait(handed)
                        keep_rows(lhs_smem.at[stage], begin, end)
                        keep_rows(grad_smem.at[stage], begin, end)
                        plgpu.commit_smem()
                        plgpu.barrier_arrive(masked)

                # Only the first and the last step of a group can hold rows of others.
                pl.when(tile_steps > 0)(functools.partial(mask_step, jnp.int32(0)))
                pl.when(tile_steps > 1)(functools.partial(mask_step, tile_steps - 1))

            for_each_tile(mask)

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
            *_barriers(tiles.stages),
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


def _barriers(stages: int) -> list[plgpu.Barrier]:
    """loaded, consumed: per stage, by the copies and by the tensor core. multiplied, stored: per accumulator."""
    return [
        plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        plgpu.Barrier(num_barriers=stages, orders_tensor_core=True),
        plgpu.Barrier(num_barriers=_ACCUMULATORS, orders_tensor_core=True),
        plgpu.Barrier(num_barriers=_ACCUMULATORS, orders_tensor_core=True),
    ]


def _advance(carry: tuple[Array, Array], steps: Array) -> tuple[Array, Array]:
    done, used = carry
    return done + steps, used + (steps > 0).astype(jnp.int32)


def _in_two_warps(
    load: Callable[..., None],
    multiply: Callable[..., None],
    for_each_tile: Callable[[Callable[..., None]], tuple[Array, Array]],
    consumed: Any,
    stored: Any,
    stages: int,
) -> None:
    @plgpu.warp_map
    def _(warp: Array) -> None:
        @pl.when(warp == _TMA_WARP)
        def _() -> None:
            done, _ = for_each_tile(load)
            await_last(consumed, done, stages)

        @pl.when(warp == _MMA_WARP)
        def _() -> None:
            _, used = for_each_tile(multiply)
            await_last(stored, used, _ACCUMULATORS)


def _load_steps(
    copies: Callable[[Array], list[tuple[Any, Any]]], loaded: Any, consumed: Any, done: Array, steps: Array, stages: int
) -> None:
    def step(k: Array, _: None) -> None:
        stage = lax.rem(done + k, jnp.int32(stages))
        pl.when(done + k >= stages)(lambda: plgpu.barrier_wait(consumed.at[stage]))
        for source, destination in copies(k):
            plgpu.copy_gmem_to_smem(source, destination.at[stage], loaded.at[stage])

    lax.fori_loop(0, steps, step, None)


def _multiply_steps(
    operands: Callable[[Array, Array], tuple[Any, Any]],
    acc: Any,
    barriers: Any,
    done: Array,
    used: Array,
    steps: Array,
    tiles: Tiles,
) -> None:
    loaded, consumed, multiplied, stored = barriers
    accumulator = lax.rem(used, jnp.int32(_ACCUMULATORS))

    @pl.when((steps > 0) & (used >= _ACCUMULATORS))
    def _() -> None:
        plgpu.barrier_wait(stored.at[accumulator])

    def step(k: Array, _: None) -> None:
        stage = lax.rem(done + k, jnp.int32(tiles.stages))
        plgpu.barrier_wait(loaded.at[stage])
        plgpu.tcgen05_mma(
            _accumulator(acc, accumulator, tiles), *operands(stage, k), consumed.at[stage], accumulate=k > 0
        )

    lax.fori_loop(0, steps, step, None)
    pl.when(steps > 0)(lambda: plgpu.tcgen05_commit_arrive(multiplied.at[accumulator]))


def _store_accumulator(
    store: Callable[[Callable[[int], Array]], None],
    acc: Any,
    multiplied: Any,
    stored: Any,
    used: Array,
    steps: Array,
    tiles: Tiles,
) -> None:
    """`store` what the tensor core has summed, and give the accumulator back; a tile without steps is 0."""
    accumulator = lax.rem(used, jnp.int32(_ACCUMULATORS))

    def read(first: int) -> Array:
        columns = pl.ds(accumulator * tiles.columns + first, SWIZZLE)
        return plgpu.async_load_tmem(acc.at[:, columns], layout=plgpu.Layout.TCGEN05)

    @pl.when(steps > 0)
    def _() -> None:
        plgpu.barrier_wait(multiplied.at[accumulator])
        store(read)
        plgpu.wait_load_tmem()  # given back, the accumulator may be overwritten at once
        plgpu.barrier_arrive(stored.at[accumulator])

    @pl.when(steps == 0)
    def _() -> None:
        store(lambda first: jnp.zeros((tiles.rows, SWIZZLE), jnp.float32))


def _accumulator(acc: Any, index: Array, tiles: Tiles) -> Any:
    return acc.at[:, pl.ds(index * tiles.columns, tiles.columns)]
