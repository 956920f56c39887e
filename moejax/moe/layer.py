"""The MoE layer: router, exchange, experts, and the shared expert beside them.

x_TD --router--> ids, weights --through_experts: dispatch, w_up_gate, SwiGLU, w_down, combine--> y_TD
x_TD --shared expert--> + y_TD
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float, Int

from moejax.config import ModelConfig
from moejax.context import Context
from moejax.models.mlp import MLP, GatedMLP, quantised_mlp
from moejax.models.parameters import weight
from moejax.models.quantised import unless
from moejax.moe.dispatch import Traffic
from moejax.moe.exchange import through_experts
from moejax.moe.losses import count_routes, load_balancing_loss, z_loss
from moejax.moe.mx_experts import QuantisedExperts
from moejax.moe.router import Router, Routing
from moejax.moe.shared import MixedSharedExperts
from moejax.moe.statistics import RouterStatistics
from pallas_kernels import grouped_mlp


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
    """y = swiglu(x w_up_gate[e]) w_down[e] for each row of group e, rows expert-major; zeros past the last group.

    x w_up_gate is what the backward keeps, or finds under the name "hidden" where blocks are recomputed.
    """
    return grouped_mlp(rows_RD, weights.w_up_gate, weights.w_down, group_sizes_e, save_as="hidden")


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
        y_TD, traffic = self.routed(x_TD, routing, context)
        with jax.named_scope("router_losses"):
            auxiliary = self.auxiliary(routing, traffic, context)
        if self.config.shared_hidden:
            with jax.named_scope("shared_expert"):
                y_TD = y_TD + self.shared(x_TD, quantised_mlp(context, "moe", "shared"))
        return y_TD, auxiliary

    def routed(
        self, x_TD: Float[Array, "T D"], routing: Routing, context: Context
    ) -> tuple[Float[Array, "T D"], Traffic]:
        """The routed experts' part of y, in MXFP8 where their weights are."""
        up_gate, down = (context.quantised_weight("moe", "experts", name) for name in ("w_up_gate", "w_down"))
        weights, recipe = self.experts.weights(x_TD.dtype), context.recipe

        def through(experts: Any, quantised: Any, *operands: Any) -> tuple[Array, Traffic]:
            weights, x, routing_weights = operands
            ids, count = routing.expert_ids, self.config.num_experts
            return through_experts(context.transport, experts, weights, x, ids, routing_weights, count, quantised)

        plain, operands = functools.partial(through, expert_mlps, None), (weights, x_TD, routing.weights)
        if recipe is None or up_gate is None or down is None:
            return plain(*operands)
        in_mx = functools.partial(through, recipe, QuantisedExperts(up_gate, down))
        return unless(context.excluded, plain, in_mx, *operands)

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
