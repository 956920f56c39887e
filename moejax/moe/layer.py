"""The MoE layer: router, dispatch, experts, combine, and the shared expert beside them.

    x_TD --router--> ids, weights --dispatch--> rows_RD --w_up_gate, SwiGLU, w_down--> rows_RD --combine--> y_TD
    x_TD --shared expert--> + y_TD
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float, Int

from moejax.config import ModelConfig
from moejax.context import Context
from moejax.models.mlp import MLP, swiglu
from moejax.models.parameters import weight
from moejax.moe.losses import count_routes, load_balancing_loss, z_loss
from moejax.moe.router import Router, Routing
from pallas_kernels import grouped_gemm


class RouterStatistics(NamedTuple):
    """This device's sums over the valid tokens of one microbatch and layer; they add up over devices and microbatches.

    counts: fp32[E]; routes per expert. scores: fp32[E]; sum of the L1-normalised scores.
    balance: fp32; load-balancing loss without weight, N times its mean. z: fp32; sum of squared log-sum-exps.
    """

    counts: Float[Array, "E"]
    scores: Float[Array, "E"]
    balance: Float[Array, ""]
    z: Float[Array, ""]


class Auxiliary(NamedTuple):
    """What a block says besides its output. loss: fp32; weighted auxiliary losses, this device's share."""

    loss: Float[Array, ""]
    statistics: RouterStatistics


def zero_statistics(n_experts: int, layers: int) -> RouterStatistics:
    per_expert, scalar = jnp.zeros((layers, n_experts), jnp.float32), jnp.zeros((layers,), jnp.float32)
    return RouterStatistics(per_expert, per_expert, scalar, scalar)


class Experts(nnx.Module):
    """The routed experts of this device: y = swiglu(x w_up_gate[e]) w_down[e], rows expert-major."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        e, d, f = config.moe.num_experts, config.d_model, config.moe.hidden
        self.w_up_gate = weight(rngs, config.init_std, (e, d, 2 * f), ("experts", "embed", "mlp"))
        self.w_down = weight(rngs, config.init_std, (e, f, d), ("experts", "mlp", "embed"))

    def __call__(self, rows_RD: Float[Array, "R D"], group_sizes_e: Int[Array, "e"]) -> Float[Array, "R D"]:
        up_gate = grouped_gemm(rows_RD, self.w_up_gate[...].astype(rows_RD.dtype), group_sizes_e)
        return grouped_gemm(swiglu(up_gate), self.w_down[...].astype(rows_RD.dtype), group_sizes_e)


class MoELayer(nnx.Module):
    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.config = config.moe
        self.router = Router(config, rngs=rngs)
        self.experts = Experts(config, rngs=rngs)
        if config.moe.shared_hidden:
            self.shared = MLP(config.d_model, config.moe.shared_hidden, config.init_std, rngs=rngs)

    def __call__(self, x_TD: Float[Array, "T D"], context: Context) -> tuple[Float[Array, "T D"], Auxiliary]:
        with jax.named_scope("router"):
            routing = self.router(x_TD, context)
            auxiliary = self.auxiliary(routing, context)
        transport = context.transport
        with jax.named_scope("dispatch"):
            arrivals = transport.dispatch(x_TD, routing.expert_ids, routing.weights, self.config.num_experts)
        with jax.named_scope("grouped_gemm"):
            rows_RD = self.experts(arrivals.rows, arrivals.group_sizes)
        with jax.named_scope("combine"):
            y_TD = transport.combine(rows_RD, arrivals.ticket)
        if self.config.shared_hidden:
            with jax.named_scope("shared_expert"):
                y_TD = y_TD + self.shared(x_TD)
        return y_TD, auxiliary

    def auxiliary(self, routing: Routing, context: Context) -> Auxiliary:
        c, (batch, length) = self.config.router, context.segment_ids.shape
        valid_T = context.valid_T
        counts_BE = count_routes(routing.expert_ids, self.config.num_experts, groups=batch)
        scores_BSE = routing.scores.reshape(batch, length, -1)
        balance = load_balancing_loss(
            c.lb_granularity, counts_BE, scores_BSE, valid_T.reshape(batch, length), self.config.top_k, context
        )
        z = z_loss(routing.logits, valid_T)
        loss = (c.lb_loss * balance + c.z_loss * z) / context.loss_tokens
        scores_E = jnp.sum(jnp.where(valid_T[:, None], routing.scores, 0.0), axis=0)
        statistics = RouterStatistics(counts_BE.sum(0), scores_E, balance, z)
        return Auxiliary(loss, jax.lax.stop_gradient(statistics))
