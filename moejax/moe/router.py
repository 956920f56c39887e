"""The router: which K experts see a token, and with what weight. All of it in fp32.

    x_TD --jitter, W, bias--> logits_TE --gating--> scores_TE --selection: bias, pools, groups, top-k--> expert_ids_TK
                                             scores at these --/ p-norm, * K, * scale--> weights_TK

What selection adds or masks decides who is chosen and never enters a weight. Whatever is drawn is drawn by sequence and
layer from `Context.key`: the same on every mesh, and the same again in recompute.
Source: Olmo-core 3 `nn/moe/v2/router.py`, `emo_router.py`; option names beside the fields of `config_moe.RouterConfig`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jaxtyping import Float, Int

from moejax.config import Assignment, Gating, ModelConfig, ScoreBias
from moejax.context import Context
from moejax.models.parameters import weight
from moejax.moe.selection import keep_groups, keep_pools, pick, round_robin

SIGMOID_EPSILON = 1e-7  # keeps scores that are all nearly zero from making the balance loss 0/0


class Routing(NamedTuple):
    """Where each token goes.

    expert_ids: int32[T, K]; E (one past the last expert) for padding tokens, which go nowhere.
    weights: fp32[T, K]; factor of each expert's output.
    scores: fp32[T, E]; summing to one per token, for the balance loss.
    logits: fp32[T, E].
    margin: fp32[T]; last chosen selection score minus the best one not chosen; no gradient.
    """

    expert_ids: Int[Array, "T K"]
    weights: Float[Array, "T K"]
    scores: Float[Array, "T E"]
    logits: Float[Array, "T E"]
    margin: Float[Array, "T"]


class Router(nnx.Module):
    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.config = config.moe.router
        self.n_experts, self.top_k = config.moe.num_experts, config.moe.top_k
        # "routes", not "experts": the router is whole on every device
        self.w = weight(rngs, config.init_std, (config.d_model, self.n_experts), ("embed", "routes"))
        if self.config.bias:
            self.b = weight(rngs, config.init_std, (self.n_experts,), ("routes",))

    def __call__(self, x_TD: Float[Array, "T D"], context: Context) -> Routing:
        c = self.config
        logits_TE = self.logits(x_TD, context)
        if c.gating == Gating.sigmoid:
            scores_TE = jax.nn.sigmoid(logits_TE) + SIGMOID_EPSILON
            normal_TE = scores_TE / jnp.sum(scores_TE, axis=-1, keepdims=True)
        else:
            scores_TE = normal_TE = jax.nn.softmax(logits_TE, axis=-1)
        if c.assignment == Assignment.random:
            # times zero, not replaced: the graph stays that of a learned router, with zero gradient (Olmo-core)
            scores_TE = scores_TE * 0.0 + context.draw(jax.random.uniform, (self.n_experts,), "scores")
        ids_TK, margin_T = self.choose(scores_TE, logits_TE, context)
        if c.gating == Gating.topk_softmax:
            weights_TK = jax.nn.softmax(jnp.take_along_axis(logits_TE, ids_TK, axis=-1), axis=-1)
        else:
            weights_TK = jnp.take_along_axis(scores_TE, ids_TK, axis=-1)
        ids_TK = jnp.where(context.valid_T[:, None], ids_TK, self.n_experts)
        return Routing(ids_TK, self.scaled(weights_TK), normal_TE, logits_TE, margin_T)

    def logits(self, x_TD: Float[Array, "T D"], context: Context) -> Float[Array, "T E"]:
        if self.config.jitter and context.training:
            low, high = 1 - self.config.jitter, 1 + self.config.jitter
            noise_TD = context.draw(jax.random.uniform, x_TD.shape[1:], "jitter")
            x_TD = x_TD * (low + noise_TD * (high - low)).astype(x_TD.dtype)
        logits_TE = jnp.matmul(
            x_TD.astype(jnp.float32), self.w[...].astype(jnp.float32), precision=lax.Precision.HIGHEST
        )
        return logits_TE + self.b[...].astype(jnp.float32) if self.config.bias else logits_TE

    def choose(
        self, scores_TE: Float[Array, "T E"], logits_TE: Float[Array, "T E"], context: Context
    ) -> tuple[Int[Array, "T K"], Float[Array, "T"]]:
        """(expert ids, margin): by score, or by logit under topk_softmax; ties to the lower id. No gradient."""
        c = self.config
        chosen_by_TE = lax.stop_gradient(logits_TE if c.gating == Gating.topk_softmax else scores_TE)
        if c.score_bias != ScoreBias.none and context.score_bias is not None:
            chosen_by_TE = chosen_by_TE + context.score_bias
        if c.pool.smallest:
            keep_TE = keep_pools(lax.stop_gradient(scores_TE), c.pool, context)
            chosen_by_TE = jnp.where(keep_TE, chosen_by_TE, -jnp.inf)
        if c.groups > 1:
            chosen_by_TE = keep_groups(chosen_by_TE, c.groups, c.top_groups)
        ids_TK, margin_T = pick(chosen_by_TE, self.top_k)
        if c.assignment == Assignment.uniform:
            ids_TK = round_robin(context, self.top_k, self.n_experts)
        return ids_TK, margin_T

    def scaled(self, weights_TK: Float[Array, "T K"]) -> Float[Array, "T K"]:
        """/ ||w||_p, * K, * weight_scale, * sqrt(original_top_k / K), each if asked for."""
        c = self.config
        if c.normalize is not None:
            weights_TK = weights_TK / jnp.linalg.norm(weights_TK, ord=c.normalize, axis=-1, keepdims=True)
        scale = c.weight_scale * (self.top_k if c.restore_scale else 1)
        if c.original_top_k is not None:
            scale *= (c.original_top_k / self.top_k) ** 0.5
        return weights_TK if scale == 1.0 else weights_TK * scale
