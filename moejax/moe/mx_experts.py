"""Experts in MXFP8: what is quantised on the way of a round, forward and backward.

    forward
      x --q--> dispatch --> x_q          up_gate = x_q w_up_gate_q          h = swiglu(up_gate)
      h --q--> h_q                       out = h_q w_down_q                 out --q--> combine --> y
    backward
      weight * dy --q--> dispatch --> g_q      dh = g_q w_down_q'^T         d up_gate = swiglu'(up_gate) dh
      d up_gate --q--> u_q                     dx = u_q w_up_gate_q'^T      dx --q--> combine --> summed over K
      dw_down = h^T (dequantised g_q)          dw_up_gate = (dequantised x_q)^T d up_gate       d weight = <out_q, dy>

q is `quantize`, blocks of 32 along the row; w_q and w_q' are the two copies of a weight. All four exchanges carry 8-bit
rows and their scales; forward and data-gradient products have MX operands; weight gradients are products in the dtype
of activations, over dequantised rows. Of the forward, x_q, up_gate and what came back are kept, all of them in MX
(up_gate in the dtype of activations if `MXRecipe.keep_hidden` is false). The recipe is Olmo-core 3's (`fp8.py`, the
table "what is quantised"), whose fused kernels make h again from up_gate as well.

Rows that exist nowhere (past the last group) may hold anything, NaN included, and are never read.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Float, PyTree

from moejax.models.mlp import swiglu
from moejax.models.quantised import MXRecipe, QuantisedWeight, keep
from moejax.moe.dispatch import Code, Plan, Transport
from pallas_kernels import MXArray, dequantize, grouped_gemm_weight_grad


class QuantisedExperts(NamedTuple):
    w_up_gate: QuantisedWeight  # [e, D, 2F]
    w_down: QuantisedWeight  # [e, F, D]


class Wire(NamedTuple):
    """Rows in MX as they travel: bytes only, whatever a collective makes of other types. [n, D] and [n, D / 32]."""

    data: Array
    scales: Array


def to_wire(rows: MXArray) -> Wire:
    return Wire(lax.bitcast_convert_type(rows.data, jnp.uint8), rows.scales)


def from_wire(wire: Wire) -> MXArray:
    return MXArray(lax.bitcast_convert_type(wire.data, jnp.float8_e4m3fn), wire.scales)


def code(recipe: MXRecipe) -> Code:
    return Code(lambda x: to_wire(recipe.quantize(x)), lambda wire: dequantize(from_wire(wire)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def mx_round(
    recipe: MXRecipe,
    transport: Transport,
    x_TD: Float[Array, "T D"],
    weights_TK: Float[Array, "T K"],
    params: PyTree[Array],
    quantised: QuantisedExperts,
    plan: Plan,
    round: Any,
) -> Float[Array, "T D"]:
    """fp32: this round's part of y. `params`, in the shape of `quantised`, receive the gradients and are not read."""
    return _forward(recipe, transport, x_TD, weights_TK, params, quantised, plan, round)[0]


def _forward(
    recipe: MXRecipe,
    transport: Transport,
    x_TD: Array,
    weights_TK: Array,
    params: Any,
    quantised: QuantisedExperts,
    plan: Plan,
    round: Any,
) -> tuple[Array, Any]:
    dtype = x_TD.dtype
    with jax.named_scope("dispatch"):
        arrivals = transport.dispatch(to_wire(recipe.quantize(x_TD)), plan, round)
    with jax.named_scope("experts"):
        x_q, sizes = from_wire(arrivals.rows), arrivals.group_sizes
        up_gate = recipe.grouped_gemm(x_q, quantised.w_up_gate.forward, sizes, dtype)
        up_gate = checkpoint_name(up_gate, "hidden")
        out_RD = recipe.grouped_gemm(recipe.swiglu_quantize(up_gate), quantised.w_down.forward, sizes, dtype)
        hidden = keep(recipe.quantize(up_gate)) if recipe.keep_hidden else up_gate
    with jax.named_scope("combine"):
        y_TD, came_back = transport.combine_coded(out_RD, weights_TK, plan, round, code(recipe))
    like = jnp.zeros((), dtype)
    return y_TD, (x_q, sizes, hidden, keep(came_back), weights_TK, params, quantised, plan, round, like)


def _backward(recipe: MXRecipe, transport: Transport, residuals: Any, grad_TD: Array) -> Any:
    x_q, sizes, hidden, came_back, weights_TK, params, quantised, plan, round, like = residuals
    dtype, travelling = like.dtype, code(recipe)
    with jax.named_scope("combine"):
        wire, grad_weights = transport.combine_coded_gradients(came_back, weights_TK, grad_TD, plan, round, travelling)
    with jax.named_scope("experts"):
        g_q = from_wire(wire)
        dh = recipe.grouped_gemm(g_q, quantised.w_down.backward, sizes, dtype)
        up_gate = dequantize(hidden, dtype) if isinstance(hidden, MXArray) else hidden
        h, pull = jax.vjp(swiglu, up_gate)
        (d_up_gate,) = pull(dh)
        dx_RD = recipe.grouped_gemm(recipe.quantize(d_up_gate), quantised.w_up_gate.backward, sizes, dtype)
        d_up = grouped_gemm_weight_grad(dequantize(x_q, dtype), d_up_gate, sizes)
        d_down = grouped_gemm_weight_grad(h, dequantize(g_q, dtype), sizes)
    with jax.named_scope("dispatch"):
        dx_TD = transport.dispatch_coded_gradient(dx_RD, plan, round, travelling)
    grad_params = jax.tree.map(lambda p, g: g.astype(p.dtype), params, type(params)(d_up, d_down))
    return dx_TD.astype(dtype), grad_weights, grad_params, None, None, None


mx_round.defvjp(_forward, _backward)
