"""The GPU kernel of routing, in Pallas Mosaic GPU: top-k of every row of logits, its log-sum-exp, and who was chosen.

    logits [64, E] --TMA--> SMEM --> registers --> row maximum, its lowest column, taken out; k times --> values, ids
                                         |--> log-sum-exp of the row
                                         `--> who was chosen, summed over rows --> counts of the block

One warpgroup a block of 64 tokens, and the logits are read once. The rows are ordered by integers: the bits of a float,
those of a negative one flipped, order as the floats do, and leave the smallest integer free for "already taken". So a
row with fewer than k finite logits still names k different experts, the lowest columns first, as `lax.top_k` does.
No tensor core is involved, so one kernel serves Hopper and Blackwell.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

ROWS = 64  # a row tile of the WGMMA layout: 4 lanes share a row
MOST_EXPERTS = 256  # a thread holds E / 2 logits, and their order
MOST_CHOSEN = 32
_TAKEN = jnp.iinfo(jnp.int32).min
_LAYOUT = plgpu.Layout.WGMMA


def reason_against(dtype: jnp.dtype, experts: int, k: int) -> str | None:
    """Why rows of this kind have no kernel on any GPU, None if they have."""
    if dtype != jnp.float32:
        return f"takes float32 logits, got {dtype}"
    if experts % 8 or experts > MOST_EXPERTS or k > MOST_CHOSEN:
        return f"takes a multiple of 8 experts up to {MOST_EXPERTS}, {MOST_CHOSEN} chosen, got {k} of {experts}"
    return None


def top_k_mosaic(logits_TE: Array, k: int, *, interpret: Any = None) -> tuple[Array, Array, Array, Array]:
    """(values [T, K], ids [T, K], lse [T], counts [blocks, E]) of fp32 logits; counts by blocks of 64 tokens.

    E a multiple of 8 up to 256. Tokens are added up to a multiple of 64, which copies the logits, and counted nowhere.
    """
    tokens, experts = logits_TE.shape
    blocks = pl.cdiv(tokens, ROWS)
    if tokens % ROWS:
        logits_TE = jnp.pad(logits_TE, ((0, blocks * ROWS - tokens), (0, 0)))

    def kernel(logits, values, ids, lse, counts, x_smem, values_smem, ids_smem, lse_smem, counts_smem, barrier):
        block = lax.axis_index("block")
        rows = pl.ds(block * ROWS, ROWS)
        plgpu.copy_gmem_to_smem(logits.at[rows], x_smem, barrier)
        plgpu.barrier_wait(barrier)
        x = plgpu.layout_cast(x_smem[...], _LAYOUT)

        def across(row: Array) -> Array:
            return lax.broadcast_in_dim(row, x.shape, [0])

        highest = jnp.maximum(jnp.max(x, axis=1), jnp.finfo(jnp.float32).min)  # finite, for rows of -inf
        lse_smem[...] = highest + jnp.log(jnp.sum(jnp.exp(x - across(highest)), axis=1))

        column = plgpu.broadcasted_iota(jnp.int32, x.shape, 1, layout=_LAYOUT)
        exists = plgpu.broadcasted_iota(jnp.int32, x.shape, 0, layout=_LAYOUT) < tokens - block * ROWS
        bits = lax.bitcast_convert_type(x, jnp.int32)
        order = jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)
        chosen_by_row = jnp.zeros(x.shape, jnp.int32)
        for n in range(k):
            best = jnp.max(order, axis=1)
            column_of_best = jnp.min(jnp.where(order == across(best), column, jnp.int32(experts)), axis=1)
            chosen = column == across(column_of_best)
            order = jnp.where(chosen, jnp.int32(_TAKEN), order)
            chosen_by_row = jnp.where(chosen & exists, jnp.int32(1), chosen_by_row)
            values_smem[n] = jnp.max(jnp.where(chosen, x, jnp.float32(-jnp.inf)), axis=1)
            ids_smem[n] = column_of_best
        counts_smem[...] = jnp.sum(chosen_by_row, axis=0)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(values_smem, values.at[:, rows])
        plgpu.copy_smem_to_gmem(ids_smem, ids.at[:, rows])
        plgpu.copy_smem_to_gmem(lse_smem, lse.at[rows])
        plgpu.copy_smem_to_gmem(counts_smem, counts.at[block])
        plgpu.wait_smem_to_gmem(0)

    shape = jax.ShapeDtypeStruct
    padded = blocks * ROWS
    values, ids, lse, counts = plgpu.kernel(
        kernel,
        out_type=[
            shape((k, padded), jnp.float32),
            shape((k, padded), jnp.int32),
            shape((padded,), jnp.float32),
            shape((blocks, experts), jnp.int32),
        ],
        scratch_types=[
            plgpu.SMEM((ROWS, experts), jnp.float32),
            plgpu.SMEM((k, ROWS), jnp.float32),
            plgpu.SMEM((k, ROWS), jnp.int32),
            plgpu.SMEM((ROWS,), jnp.float32),
            plgpu.SMEM((experts,), jnp.int32),
            plgpu.Barrier(),
        ],
        grid=(blocks,),
        grid_names=("block",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        kernel_name="routing_top_k",
        interpret=interpret,
    )(logits_TE)
    return values[:, :tokens].T, ids[:, :tokens].T, lse[:tokens], counts
