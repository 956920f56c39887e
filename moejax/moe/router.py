"""The router: which K experts see a token, and with what weight. All of it in fp32.

    x_TD --W--> logits_TE --gating--> scores_TE --top-k--> expert_ids_TK, weights_TK --/ p-norm, * K, * scale--> weights_TK

Source: Olmo-core 3 `nn/moe/v2/router.py`; option names beside the fields of `config.RouterConfig`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jaxtyping import Float, Int

from moejax.config import Assignment, Gating, ModelConfig
from moejax.context import Context
from moejax.models.parameters import weight

SIGMOID_EPSILON = 1e-7  # keeps scores that are all nearly zero from making the balance loss 0/0


class Routing(NamedTuple):
    """Where each token goes.

    expert_ids: int32[T, K]; E (one past the last expert) for padding tokens, which go nowhere.
    weights: fp32[T, K]; factor of each expert's output.
    scores: fp32[T, E]; summing to one per token, for the balance loss.
    logits: fp32[T, E].
    """

    expert_ids: Int[Array, "T K"]
    weights: Float[Array, "T K"]
    scores: Float[Array, "T E"]
    logits: Float[Array, "T E"]


class Router(nnx.Module):
    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.config = config.moe.router
        self.n_experts, self.top_k = config.moe.num_experts, config.moe.top_k
        # "routes", not "experts": the router is whole on every device
        self.w = weight(rngs, config.init_std, (config.d_model, self.n_experts), ("embed", "routes"))

    def __call__(self, x_TD: Float[Array, "T D"], context: Context) -> Routing:
        c = self.config
        logits_TE = jnp.matmul(
            x_TD.astype(jnp.float32), self.w[...].astype(jnp.float32), precision=lax.Precision.HIGHEST
        )
        if c.gating == Gating.softmax:
            scores_TE = normal_TE = jax.nn.softmax(logits_TE, axis=-1)
        else:
            scores_TE = jax.nn.sigmoid(logits_TE) + SIGMOID_EPSILON
            normal_TE = scores_TE / jnp.sum(scores_TE, axis=-1, keepdims=True)
        if c.assignment == Assignment.random:
            # times zero, not replaced: the graph stays that of a learned router, with zero gradient (Olmo-core)
            scores_TE = scores_TE * 0.0 + _random_scores(context, self.n_experts)
        weights_TK, ids_TK = _top_k(scores_TE, self.top_k)
        if c.assignment == Assignment.uniform:
            ids_TK = _round_robin(context, self.top_k, self.n_experts)
            weights_TK = jnp.take_along_axis(scores_TE, ids_TK, axis=-1)
        if c.normalize is not None:
            weights_TK = weights_TK / jnp.linalg.norm(weights_TK, ord=c.normalize, axis=-1, keepdims=True)
        if c.restore_scale:
            weights_TK = weights_TK * self.top_k
        if c.weight_scale != 1.0:
            weights_TK = weights_TK * c.weight_scale
        ids_TK = jnp.where(context.valid_T[:, None], ids_TK, self.n_experts)
        return Routing(ids_TK, weights_TK, normal_TE, logits_TE)


def _top_k(scores_TE: Float[Array, "T E"], k: int) -> tuple[Float[Array, "T K"], Int[Array, "T K"]]:
    """The k largest scores and their experts, ties to the lower id; gradient through the scores alone."""
    _, ids_TK = lax.top_k(lax.stop_gradient(scores_TE), k)
    return jnp.take_along_axis(scores_TE, ids_TK, axis=-1), ids_TK


def _random_scores(context: Context, n_experts: int) -> Float[Array, "T E"]:
    """U(0,1) per token and expert, drawn by sequence: the same on every mesh, and the same again in recompute."""
    assert context.key is not None, "random assignment needs Context.key"
    length = context.segment_ids.shape[1]
    keys_B = jax.vmap(lambda i: jax.random.fold_in(context.key, i))(context.sequence_ids)
    return jax.vmap(lambda key: jax.random.uniform(key, (length, n_experts)))(keys_B).reshape(-1, n_experts)


def _round_robin(context: Context, k: int, n_experts: int) -> Int[Array, "T K"]:
    """Route r of token t goes to expert (t K + r) mod E, t counted over the microbatch as a whole."""
    length = context.segment_ids.shape[1]
    token_T = (context.sequence_ids[:, None] * length + jnp.arange(length)).reshape(-1)
    return ((token_T[:, None] * k + jnp.arange(k)) % n_experts).astype(jnp.int32)
