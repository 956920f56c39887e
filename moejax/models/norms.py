"""RMSNorm, the one norm of the house."""

import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jaxtyping import Float

from moejax.models.parameters import gain


def rms_norm(x: Float[Array, "*batch D"], gain_D: Float[Array, "D"], eps: float) -> Float[Array, "*batch D"]:
    """x / sqrt(mean(x^2) + eps) * gain, all in fp32, cast back to x's dtype at the end (Olmo-core `full_precision`)."""
    x32 = x.astype(jnp.float32)
    x32 = x32 * lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (x32 * gain_D.astype(jnp.float32)).astype(x.dtype)


class RMSNorm(nnx.Module):
    def __init__(self, size: int, eps: float, axis: str = "embed"):
        self.gain = gain(size, axis)
        self.eps = eps

    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        return rms_norm(x, self.gain[...], self.eps)
