"""The router's auxiliary losses, each a sum over tokens divided by the non-ignored tokens of the whole batch.

With N = `Context.loss_tokens`, n_e routes to expert e (they sum to K per token), p_te scores that sum to one per token:

    load balancing   (E / K) * sum_e n_e * mean_t(p_te) * (weight / N)     1 per token when balanced; no gradient in n_e
    router z-loss    sum_t logsumexp(logits_t)^2 * (weight / N)

Every function returns this device's share: shares add up over devices and microbatches to the loss.
Source: Olmo-core 3 `nn/moe/loss.py`, `lb_loss_granularity`.
"""

import jax.numpy as jnp
from jax import Array, lax, nn
from jaxtyping import Bool, Float, Int

from moejax.config import BalanceGranularity
from moejax.context import Context


def load_balancing_loss(
    granularity: BalanceGranularity,
    counts_BE: Float[Array, "B E"],
    scores_BSE: Float[Array, "B S E"],
    valid_BS: Bool[Array, "B S"],
    top_k: int,
    context: Context,
) -> Float[Array, ""]:
    """This device's share of (E/K) sum_e n_e mean_t(p_te), not yet weighted or divided by N.

    counts_BE: routes of valid tokens per sequence, no gradient. scores_BSE: L1-normalised over experts.
    """
    n_experts = scores_BSE.shape[-1]
    counts_BE = lax.stop_gradient(counts_BE)
    score_sums_BE = jnp.sum(jnp.where(valid_BS[..., None], scores_BSE, 0.0), axis=1)
    if granularity == BalanceGranularity.instance:
        tokens_B = jnp.maximum(jnp.sum(valid_BS, axis=1), 1).astype(jnp.float32)
        balance = jnp.sum(counts_BE * score_sums_BE / tokens_B[:, None])
    elif granularity == BalanceGranularity.local:
        tokens = jnp.maximum(jnp.sum(valid_BS), 1).astype(jnp.float32)
        balance = jnp.sum(counts_BE.sum(0) * score_sums_BE.sum(0)) / tokens
    else:
        counts_E = lax.stop_gradient(context.sum_over_data(counts_BE.sum(0)))
        balance = jnp.sum(counts_E * score_sums_BE.sum(0)) / jnp.maximum(context.batch_tokens, 1.0)
    return balance * (n_experts / top_k)


def z_loss(logits_TE: Float[Array, "T E"], valid_T: Bool[Array, "T"]) -> Float[Array, ""]:
    """sum_t logsumexp(logits_t)^2 over valid tokens, fp32."""
    return jnp.sum(jnp.where(valid_T, nn.logsumexp(logits_TE.astype(jnp.float32), axis=-1) ** 2, 0.0))


def count_routes(expert_ids_TK: Int[Array, "T K"], n_experts: int, groups: int = 1) -> Float[Array, "G E"]:
    """Routes per expert, for each of `groups` equal runs of tokens; ids outside [0, E) are counted nowhere. fp32, exact
    to 2^24."""
    ids_GR = expert_ids_TK.reshape(groups, -1)
    rows = jnp.broadcast_to(jnp.arange(groups)[:, None], ids_GR.shape)
    # mode="drop" leaves out the id E of padding tokens
    return jnp.zeros((groups, n_experts), jnp.float32).at[rows, ids_GR].add(1.0, mode="drop")
