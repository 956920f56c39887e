"""The MoE layer: router, exchange, experts, and the shared expert beside them.

x_TD --router--> ids, weights --through_experts: dispatch, w_up_gate, SwiGLU, w_down, combine--> y_TD
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
from moejax.models.mlp import MLP, GatedMLP, quantised_mlp, swiglu
from moejax.models.parameters import weight
from moejax.moe.dispatch import Traffic
from moejax.moe.exchange import through_experts
from moejax.moe.mx_experts import QuantisedExperts
from moejax.moe.losses import count_routes, load_balancing_loss, z_loss
from moejax.moe.router import Router, Routing
from moejax.moe.shared import MixedSharedExperts
from moejax.moe.statistics import RouterStatistics
from pallas_kernels import grouped_gemm


class Auxiliary(NamedTuple):
    """What a block says besides its output. loss: fp32; weighted auxiliary losses, this device's share."""

    loss: Float[Array, ""]
    statistics: RouterStatistics


class ExpertWeights(NamedTuple):
    w_up_gate: Float[Array, "e D F2"]
    w_down: Float[Array, "e F D"]


def expert_mlps(
    weights: ExpertWeights, rows_RD: Float[Array, "R D"], group_sizes_e: Int[Array, "e"]
) -> Float[Array, "R D"]:
    """y = swiglu(x w_up_gate[e]) w_down[e] for each row of group e, rows expert-major; zeros past the last group."""
    up_gate = grouped_gemm(rows_RD, weights.w_up_gate, group_sizes_e)
    return grouped_gemm(swiglu(up_gate), weights.w_down, group_sizes_e)


class Experts(nnx.Module):
    """The routed experts of this device."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        e, d, f = config.moe.num_experts, config.d_model, config.moe.hidden
        self.w_up_gate = weight(rngs, config.init_std, (e, d, 2 * f), ("experts", "embed", "mlp"))
        self.w_down = weight(rngs, config.init_std, (e, f, d), ("experts", "mlp", "embed"))

    def weights(self, dtype: jnp.dtype) -> ExpertWeights:
        return ExpertWeights(self.w_up_gate[...].astype(dtype), self.w_down[...].astype(dtype))


class MoELayer(nnx.Module):
    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.config = config.moe
        self.router = Router(config, rngs=rngs)
        self.experts = Experts(config, rngs=rngs)
        if config.moe.shared_hidden and config.moe.shared_experts == 1:
            kind = GatedMLP if config.moe.shared_gate else MLP
            self.shared = kind(config.d_model, config.moe.shared_hidden, config.init_std, rngs=rngs)
        elif config.moe.shared_hidden:
            self.shared = MixedSharedExperts(config, rngs=rngs)

    def __call__(self, x_TD: Float[Array, "T D"], context: Context) -> tuple[Float[Array, "T D"], Auxiliary]:
        with jax.named_scope("router"):
            routing = self.router(x_TD, context)
        up_gate, down = (context.quantised_weight("moe", "experts", name) for name in ("w_up_gate", "w_down"))
        in_mx = up_gate is not None and down is not None
        y_TD, traffic = through_experts(
            context.transport,
            context.recipe if in_mx and context.recipe else expert_mlps,
            self.experts.weights(x_TD.dtype),
            x_TD,
            routing.expert_ids,
            routing.weights,
            self.config.num_experts,
            QuantisedExperts(up_gate, down) if in_mx else None,
        )
        with jax.named_scope("router_losses"):
            auxiliary = self.auxiliary(routing, traffic, context)
        if self.config.shared_hidden:
            with jax.named_scope("shared_expert"):
                y_TD = y_TD + self.shared(x_TD, quantised_mlp(context, "moe", "shared"))
        return y_TD, auxiliary

    def auxiliary(self, routing: Routing, traffic: Traffic, context: Context) -> Auxiliary:
        c, (batch, length) = self.config.router, context.segment_ids.shape
        valid_T = context.valid_T
        counts_BE = count_routes(routing.expert_ids, self.config.num_experts, groups=batch)
        scores_BSE = routing.scores.reshape(batch, length, -1)
        balance = load_balancing_loss(
            c.lb_granularity, counts_BE, scores_BSE, valid_T.reshape(batch, length), self.config.top_k, context
        )
        z = z_loss(routing.logits, valid_T)
        loss = (c.lb_loss * balance + c.z_loss * z) / context.loss_tokens
        statistics = RouterStatistics(
            counts=counts_BE.sum(0),
            scores=jnp.sum(jnp.where(valid_T[:, None], routing.scores, 0.0), axis=0),
            balance=balance,
            z=z,
            margin=jnp.sum(jnp.where(valid_T, routing.margin, 0.0)),
            **traffic._asdict(),
            exchanges=jnp.ones((), jnp.float32),
        )
        return Auxiliary(loss, jax.lax.stop_gradient(statistics))
