"""Shared experts: MLPs that see every token, beside the routed ones.

    one     y = mlp(x)
    more    y = sum_i p_i(x) mlp_i(x),   p = sigmoid(x W) / sum of it      mixed by a second, dense router in fp32

Source: Olmo-core 3 `SharedExpertsConfig`, `shared_experts_router` (sigmoid, L1-normalised, `scores_only`).
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jaxtyping import Float

from moejax.config import ModelConfig
from moejax.models.mlp import swiglu
from moejax.models.parameters import weight
from moejax.moe.router import SIGMOID_EPSILON


class MixedSharedExperts(nnx.Module):
    """Several shared experts of hidden width F each; letters: G shared experts."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        g, d, f = config.moe.shared_experts, config.d_model, config.moe.shared_hidden
        # "shared", not "experts": they are whole on every device
        self.router_w = weight(rngs, config.init_std, (d, g), ("embed", "shared"))
        self.w_up_gate = weight(rngs, config.init_std, (g, d, 2 * f), ("shared", "embed", "mlp"))
        self.w_down = weight(rngs, config.init_std, (g, f, d), ("shared", "mlp", "embed"))

    def mixture(self, x_TD: Float[Array, "T D"]) -> Float[Array, "T G"]:
        """fp32; p of the docstring."""
        w = self.router_w[...].astype(jnp.float32)
        scores_TG = jax.nn.sigmoid(jnp.matmul(x_TD.astype(jnp.float32), w, precision=lax.Precision.HIGHEST))
        scores_TG = scores_TG + SIGMOID_EPSILON
        return scores_TG / jnp.sum(scores_TG, axis=-1, keepdims=True)

    def __call__(self, x_TD: Float[Array, "T D"], quantised: None = None) -> Float[Array, "T D"]:
        del quantised  # one product over several experts' hidden widths; validate_mxfp8 refuses it
        dtype = x_TD.dtype
        hidden_GTF = swiglu(jnp.einsum("td,gdf->gtf", x_TD, self.w_up_gate[...].astype(dtype)))
        # weighted before the down projection, which is linear: one product sums over experts and hidden width
        hidden_GTF = hidden_GTF * self.mixture(x_TD).T[:, :, None].astype(dtype)
        return jnp.einsum("gtf,gfd->td", hidden_GTF, self.w_down[...].astype(dtype))
