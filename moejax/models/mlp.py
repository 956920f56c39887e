"""SwiGLU, and the dense MLP that leading blocks and shared experts are made of."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Float

from moejax.context import Context
from moejax.models.parameters import weight
from moejax.models.quantised import MXRecipe, QuantisedWeight, mx_linear, unless


def swiglu(up_gate: Float[Array, "*batch F2"]) -> Float[Array, "*batch F"]:
    """up * silu(gate); the packed input holds up first, then gate, as Olmo-core's `w_up_gate`."""
    up, gate = jnp.split(checkpoint_name(up_gate, "hidden"), 2, axis=-1)
    return up * jax.nn.silu(gate)


class QuantisedMLP(NamedTuple):
    w_up_gate: QuantisedWeight
    w_down: QuantisedWeight
    recipe: MXRecipe
    excluded: Array | None


def quantised_mlp(context: Context, *path: str) -> QuantisedMLP | None:
    """The MLP at this place among the block's parameters, if its weights are kept in MXFP8."""
    up_gate, down = (context.quantised_weight(*path, name) for name in ("w_up_gate", "w_down"))
    if up_gate is None or down is None or context.recipe is None:
        return None
    return QuantisedMLP(up_gate, down, context.recipe, context.excluded)


def _plain_mlp(x: Array, w_up_gate: Array, w_down: Array) -> Array:
    return swiglu(x @ w_up_gate) @ w_down


def _mx_mlp(quantised: QuantisedMLP, x: Array, w_up_gate: Array, w_down: Array) -> Array:
    hidden = swiglu(mx_linear(x, w_up_gate, quantised.w_up_gate, quantised.recipe))
    return mx_linear(hidden, w_down, quantised.w_down, quantised.recipe)


class MLP(nnx.Module):
    """y = swiglu(x w_up_gate) w_down, hidden width F."""

    def __init__(self, d_model: int, hidden: int, std: float, *, rngs: nnx.Rngs):
        self.w_up_gate = weight(rngs, std, (d_model, 2 * hidden), ("embed", "mlp"))
        self.w_down = weight(rngs, std, (hidden, d_model), ("mlp", "embed"))

    def __call__(self, x: Float[Array, "*batch D"], quantised: QuantisedMLP | None = None) -> Float[Array, "*batch D"]:
        """quantised: its weights in MXFP8, if they are to be used."""
        weights = self.w_up_gate[...].astype(x.dtype), self.w_down[...].astype(x.dtype)
        if quantised is None:
            return _plain_mlp(x, *weights)
        in_mx = functools.partial(_mx_mlp, quantised)
        return unless(quantised.excluded, _plain_mlp, in_mx, x, *weights)


class GatedMLP(MLP):
    """y = sigmoid(x w_gate) * MLP(x), one gate a token, taken in fp32: the shared expert of Qwen2-MoE."""

    def __init__(self, d_model: int, hidden: int, std: float, *, rngs: nnx.Rngs):
        super().__init__(d_model, hidden, std, rngs=rngs)
        self.w_gate = weight(rngs, std, (d_model,), ("embed",))

    def __call__(self, x: Float[Array, "*batch D"], quantised: QuantisedMLP | None = None) -> Float[Array, "*batch D"]:
        gate = jax.nn.sigmoid(x.astype(jnp.float32) @ self.w_gate[...].astype(jnp.float32))
        return gate[..., None].astype(x.dtype) * super().__call__(x, quantised)
