"""SwiGLU, and the dense MLP that leading blocks and shared experts are made of."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Float

from moejax.models.parameters import weight


def swiglu(up_gate: Float[Array, "*batch F2"]) -> Float[Array, "*batch F"]:
    """up * silu(gate); the packed input holds up first, then gate, as Olmo-core's `w_up_gate`."""
    up, gate = jnp.split(checkpoint_name(up_gate, "hidden"), 2, axis=-1)
    return up * jax.nn.silu(gate)


class MLP(nnx.Module):
    """y = swiglu(x w_up_gate) w_down, hidden width F."""

    def __init__(self, d_model: int, hidden: int, std: float, *, rngs: nnx.Rngs):
        self.w_up_gate = weight(rngs, std, (d_model, 2 * hidden), ("embed", "mlp"))
        self.w_down = weight(rngs, std, (hidden, d_model), ("mlp", "embed"))

    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        return swiglu(x @ self.w_up_gate[...].astype(x.dtype)) @ self.w_down[...].astype(x.dtype)


class GatedMLP(MLP):
    """y = sigmoid(x w_gate) * MLP(x), one gate a token, taken in fp32: the shared expert of Qwen2-MoE."""

    def __init__(self, d_model: int, hidden: int, std: float, *, rngs: nnx.Rngs):
        super().__init__(d_model, hidden, std, rngs=rngs)
        self.w_gate = weight(rngs, std, (d_model,), ("embed",))

    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        gate = jax.nn.sigmoid(x.astype(jnp.float32) @ self.w_gate[...].astype(jnp.float32))
        return gate[..., None].astype(x.dtype) * super().__call__(x)
