"""What decides among scores: groups, document pools, top-k, and the round robin of throughput runs. No gradient here.

    selection scores_TE --keep_pools, keep_groups: -inf out of reach--> selection scores_TE --pick--> expert_ids_TK

Also the update of the score bias, which belongs to an optimizer step and not to a token.
"""

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Bool, Float, Int

from moejax.config import PoolConfig
from moejax.context import Context
from pallas_kernels import top_k


def pick(chosen_by_TE: Float[Array, "T E"], k: int) -> tuple[Int[Array, "T K"], Float[Array, "T"]]:
    """The k largest, ties to the lower id; and by how much the last of them leads the next that could be chosen.

    The ids bear the name "chosen": recomputed blocks keep them (`parallel.stage`).
    """
    top = top_k(chosen_by_TE, min(k + 1, chosen_by_TE.shape[-1]))
    margin_T = top.values[:, k - 1] - top.values[:, -1]
    return checkpoint_name(top.ids[:, :k], "chosen"), jnp.where(jnp.isfinite(margin_T), margin_T, 0.0)


def keep_groups(chosen_by_TE: Float[Array, "T E"], groups: int, top_groups: int) -> Float[Array, "T E"]:
    """-inf outside the `top_groups` groups whose two best experts have the largest sum (DeepSeek-V3, `n_group`)."""
    by_group = chosen_by_TE.reshape(-1, groups, chosen_by_TE.shape[-1] // groups)
    group_scores = jnp.sum(lax.top_k(by_group, min(2, by_group.shape[-1]))[0], axis=-1)
    _, best = lax.top_k(group_scores, top_groups)
    keep = jnp.any(best[:, :, None] == jnp.arange(groups), axis=1)
    return jnp.where(keep[:, :, None], by_group, -jnp.inf).reshape(chosen_by_TE.shape)


def keep_pools(scores_TE: Float[Array, "T E"], pool: PoolConfig, context: Context) -> Bool[Array, "T E"]:
    """The experts of each token's document: those with the largest sum of scores over the document's tokens here.

    The pool's size is drawn for each document, uniform in [smallest, largest]; outside training it is fixed.
    Source: EMO, Olmo-core 3 `nn/moe/emo.py`.
    """
    batch, length = context.segment_ids.shape
    new = jnp.diff(context.segment_ids, axis=1, prepend=context.segment_ids[:, :1]) != 0
    document_BS = jnp.cumsum(new, axis=1)  # from 0 in each sequence, whatever the ids are
    scores_BSE = jnp.where(context.valid_T[:, None], scores_TE, 0).reshape(batch, length, -1)
    add = lambda scores, document: jax.ops.segment_sum(scores, document, num_segments=length)  # noqa: E731
    sums_BSE = jax.vmap(add)(scores_BSE, document_BS)
    rank_BSE = jnp.argsort(jnp.argsort(-sums_BSE, axis=-1, stable=True), axis=-1)
    if context.training:
        draw = lambda key, shape: jax.random.randint(key, shape, pool.smallest, pool.largest + 1)  # noqa: E731
        size_BS = context.draw(draw, (), "pool").reshape(batch, length)
    else:
        size_BS = jnp.full((batch, length), pool.evaluation_size)
    keep_BSE = rank_BSE < size_BS[..., None]
    return jnp.take_along_axis(keep_BSE, document_BS[..., None], axis=1).reshape(scores_TE.shape)


def round_robin(context: Context, k: int, n_experts: int) -> Int[Array, "T K"]:
    """Route r of token t goes to expert (t K + r) mod E, t counted over the microbatch as a whole."""
    length = context.segment_ids.shape[1]
    token_T = (context.sequence_ids[:, None] * length + jnp.arange(length)).reshape(-1)
    return ((token_T[:, None] * k + jnp.arange(k)) % n_experts).astype(jnp.int32)


def move_score_bias(bias_LE: Float[Array, "L E"], counts_LE: Float[Array, "L E"], rate: float) -> Float[Array, "L E"]:
    """bias += rate * sign(mean load - load), once a step, from the routes of the whole batch, padding left out.

    Source: Wang et al., "Auxiliary-loss-free load balancing"; Olmo-core `bias_gamma`.
    """
    return bias_LE + rate * jnp.sign(jnp.mean(counts_LE, axis=-1, keepdims=True) - counts_LE)
