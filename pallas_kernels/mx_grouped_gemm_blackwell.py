"""Grouped GEMM kernel for MXFP8 on Blackwell (sm_100a, sm_103a), in Pallas Mosaic GPU: block-scaled tcgen05.

    GMEM --TMA, a warp--> ring of SMEM stages: 128 x 128 bytes of each operand, 128 x 4 scales of each
         --tcgen05.cp--> scales in TMEM --tcgen05.mma.block_scale, the same warp--> two accumulators in TMEM
         --a warpgroup--> GMEM

The walk over tiles, the ragged edges and the three roles are those of the bfloat16 kernel (grouped_gemm_blackwell.py).
Tiles of rows start where their group does, not at multiples of 128, so the scales of the left operand are laid out tile
by tile before the kernel (`tile_scales`: a gather of 1/32 of the operand). A tile may hold rows of other groups, and
rows that do not exist: each row of the product depends on its own row alone, and only the group's rows are stored.
Copies and products of one warp reach the tensor core in order, so one set of scales in TMEM serves all stages.
Compiled for GPUs that are absent, never run on one: tile sizes are chosen by TMEM (two accumulators of 128 columns and
the scales, of 512), not by measurement.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped_gemm_epilogue import OPERAND, SWIZZLE, await_last, store_rows
from pallas_kernels.grouped_gemm_tiles import OCTET, RowTiles, Tiles, row_tiles
from pallas_kernels.mxfp8 import BLOCK, MXArray, pack_scales

_DRIVE, _STORE = 0, 1  # warpgroups
_TMA_WARP, _MMA_WARP = 0, 1  # warps of the first one
_ACCUMULATORS = 2
_BYTES = (
    plgpu.TilingTransform((8, 128)),  # pyright: ignore[reportAbstractUsage]
    plgpu.SwizzleTransform(128),  # pyright: ignore[reportAbstractUsage]
)
MX_TILES = Tiles(rows=128, columns=128, depth=128, stages=5)


def reason_against(width: int, depth: int) -> str | None:
    """Why products [R, K = depth] x [E, N = width, K] have no kernel; None if they have."""
    if width % MX_TILES.columns or depth % MX_TILES.depth:
        return f"takes N and K that are multiples of {MX_TILES.depth}, got {width} and {depth}"
    return None


def tile_scales(scales_RS: Array, schedule: RowTiles, tile_rows: int) -> Array:
    """[slots, K / 128, 32, 16]: the scales of each tile's rows, packed; rows past the end have those of the last."""
    rows = schedule.octets[:, None] * OCTET + jnp.arange(tile_rows, dtype=jnp.int32)
    return pack_scales(jnp.take(scales_RS, rows, axis=0, mode="clip"))[:, 0]


def mx_grouped_gemm_blackwell(
    lhs_RK: MXArray, rhs_ENK: MXArray, group_sizes_E: Array, *, num_sms: int, tiles: Tiles = MX_TILES
) -> Array:
    """`mx_grouped_gemm` in bfloat16; N and K multiples of 128 (checked by the caller)."""
    missing = -lhs_RK.shape[0] % OCTET
    data = jnp.pad(lhs_RK.data, ((0, missing), (0, 0))) if missing else lhs_RK.data
    rows, depth = data.shape
    num_groups, width, _ = rhs_ENK.shape
    schedule = row_tiles(group_sizes_E, rows, tiles.rows)
    e8m0 = functools.partial(lax.bitcast_convert_type, new_dtype=jnp.float8_e8m0fnu)
    lhs_scales = e8m0(tile_scales(lhs_RK.scales, schedule, tiles.rows))
    rhs_scales = e8m0(pack_scales(rhs_ENK.scales))
    column_tiles, steps = width // tiles.columns, depth // tiles.depth
    stages = tiles.stages

    def kernel(groups, octets, begins, ends, total, lhs, lhs_s, rhs, rhs_s, out, *scratch):
        lhs_smem, lhs_s_smem, rhs_smem, rhs_s_smem, acc, lhs_tmem, rhs_tmem, whole, part, *barriers = scratch
        loaded, consumed, multiplied, stored = barriers
        warpgroup = lax.axis_index("warpgroup")

        def for_each_tile(body: Callable[..., None]) -> tuple[Array, Array]:
            """body(slot, column tile, steps, steps done before, accumulators used before)."""

            loop_over = plgpu.nd_loop(
                (total[0] * column_tiles,), collective_axes="sm", init_carry=(jnp.int32(0), jnp.int32(0))
            )

            def tile(loop: plgpu.NDLoopInfo, carry: tuple[Array, Array]) -> tuple[Array, Array]:
                done, used = carry
                slot, column = plgpu.planar_snake(loop.index[0], (total[0], column_tiles), 0, tiles.panel)
                exists = groups[slot] < num_groups  # else rows past the last group: zeros
                body(slot, column, jnp.where(exists, jnp.int32(steps), jnp.int32(0)), done, used)
                return done + jnp.where(exists, jnp.int32(steps), jnp.int32(0)), used + exists.astype(jnp.int32)

            return loop_over(tile)

        def load(slot: Array, column: Array, tile_steps: Array, done: Array, used: Array) -> None:
            del used
            group = groups[slot]

            def step(k: Array, _: None) -> None:
                stage = lax.rem(done + k, jnp.int32(stages))
                pl.when(done + k >= stages)(lambda: plgpu.barrier_wait(consumed.at[stage]))
                contracted = pl.ds(k * tiles.depth, tiles.depth)
                from_lhs = lhs.at[pl.ds(octets[slot] * OCTET, tiles.rows), contracted]
                from_rhs = rhs.at[group, pl.ds(column * tiles.columns, tiles.columns), contracted]
                for source, target in (
                    (from_lhs, lhs_smem),
                    (lhs_s.at[pl.ds(slot, 1), pl.ds(k, 1)], lhs_s_smem),
                    (from_rhs, rhs_smem),
                    (rhs_s.at[group, pl.ds(column, 1), pl.ds(k, 1)], rhs_s_smem),
                ):
                    plgpu.copy_gmem_to_smem(source, target.at[stage], loaded.at[stage])

            lax.fori_loop(0, tile_steps, step, None)

        def multiply(slot: Array, column: Array, tile_steps: Array, done: Array, used: Array) -> None:
            del slot, column
            accumulator = lax.rem(used, jnp.int32(_ACCUMULATORS))
            into = acc.at[:, pl.ds(accumulator * tiles.columns, tiles.columns)]

            @pl.when((tile_steps > 0) & (used >= _ACCUMULATORS))
            def _() -> None:
                plgpu.barrier_wait(stored.at[accumulator])

            def step(k: Array, _: None) -> None:
                stage = lax.rem(done + k, jnp.int32(stages))
                plgpu.barrier_wait(loaded.at[stage])
                plgpu.async_copy_scales_to_tmem(lhs_s_smem.at[stage], lhs_tmem)
                plgpu.async_copy_scales_to_tmem(rhs_s_smem.at[stage], rhs_tmem)
                plgpu.tcgen05_mma(
                    into,
                    lhs_smem.at[stage],
                    rhs_smem.at[stage].transpose((1, 0)),
                    consumed.at[stage],
                    a_scale=lhs_tmem,
                    b_scale=rhs_tmem,
                    accumulate=k > 0,
                )

            lax.fori_loop(0, tile_steps, step, None)
            pl.when(tile_steps > 0)(lambda: plgpu.tcgen05_commit_arrive(multiplied.at[accumulator]))

        def store(slot: Array, column: Array, tile_steps: Array, done: Array, used: Array) -> None:
            del done
            accumulator = lax.rem(used, jnp.int32(_ACCUMULATORS))
            start = octets[slot] * OCTET
            begin, end = begins[slot] - start, ends[slot] - start

            def put(read: Callable[[int], Array]) -> None:
                store_rows(read, tiles.columns, out, start, begin, end, column * tiles.columns, whole, part)

            def read(first: int) -> Array:
                columns = pl.ds(accumulator * tiles.columns + first, SWIZZLE)
                return plgpu.async_load_tmem(acc.at[:, columns], layout=plgpu.Layout.TCGEN05)

            @pl.when(tile_steps > 0)
            def _() -> None:
                plgpu.barrier_wait(multiplied.at[accumulator])
                put(read)
                plgpu.wait_load_tmem()  # given back, the accumulator may be overwritten at once
                plgpu.barrier_arrive(stored.at[accumulator])

            @pl.when(tile_steps == 0)
            def _() -> None:
                put(lambda first: jnp.zeros((tiles.rows, SWIZZLE), jnp.float32))

        @pl.when(warpgroup == _DRIVE)
        def _() -> None:
            @plgpu.warp_map
            def _(warp: Array) -> None:
                @pl.when(warp == _TMA_WARP)
                def _() -> None:
                    await_last(consumed, for_each_tile(load)[0], stages)

                @pl.when(warp == _MMA_WARP)
                def _() -> None:
                    await_last(stored, for_each_tile(multiply)[1], _ACCUMULATORS)

        @pl.when(warpgroup == _STORE)
        def _() -> None:
            for_each_tile(store)
            plgpu.wait_smem_to_gmem(0)

    scale_bytes = tiles.depth // BLOCK
    out_RN = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((rows, width), jnp.bfloat16),
        scratch_types=[
            plgpu.SMEM((stages, tiles.rows, tiles.depth), data.dtype, transforms=_BYTES),
            plgpu.SMEM((stages, 1, 1, 32, 16), lhs_scales.dtype),
            plgpu.SMEM((stages, tiles.columns, tiles.depth), data.dtype, transforms=_BYTES),
            plgpu.SMEM((stages, 1, 1, 32, 16), rhs_scales.dtype),
            plgpu.TMEM((tiles.rows, _ACCUMULATORS * tiles.columns), jnp.float32),
            plgpu.TMEM((tiles.rows, scale_bytes), lhs_scales.dtype, layout=plgpu.TMEMLayout.SCALES_LAYOUT),
            plgpu.TMEM((tiles.columns, scale_bytes), rhs_scales.dtype, layout=plgpu.TMEMLayout.SCALES_LAYOUT),
            plgpu.SMEM((tiles.rows, SWIZZLE), jnp.bfloat16, transforms=OPERAND),
            plgpu.SMEM((tiles.rows, SWIZZLE), jnp.bfloat16),
            plgpu.Barrier(num_arrivals=4, num_barriers=stages),  # loaded: two operands and their scales
            plgpu.Barrier(num_barriers=stages, orders_tensor_core=True),
            plgpu.Barrier(num_barriers=_ACCUMULATORS, orders_tensor_core=True),
            plgpu.Barrier(num_barriers=_ACCUMULATORS, orders_tensor_core=True),
        ],
        kernel_name="mx_grouped_gemm_blackwell",
        grid=(num_sms,),
        grid_names=("sm",),
        num_threads=2,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )(*schedule, data, lhs_scales, rhs_ENK.data, rhs_scales)
    return lax.slice_in_dim(out_RN, 0, lhs_RK.shape[0])
