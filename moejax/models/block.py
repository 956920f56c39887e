"""One block: attention and an MLP or experts, with the three norm placements of Olmo-core 3.

    reordered   h = x + N(Attn(x))       y = h + N(F(h))
    peri        h = x + N(Attn(N(x)))    y = h + N(F(N(h)))
    pre         h = x + Attn(N(x))       y = h + F(N(h))

F is a dense MLP in the leading blocks, routed plus shared experts in the others.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float, Int

from moejax.config import ModelConfig, NormPlacement
from moejax.context import Context
from moejax.models.attention import Attention
from moejax.models.mlp import MLP, quantised_mlp
from moejax.models.norms import RMSNorm
from moejax.moe.layer import Auxiliary, MoELayer
from moejax.moe.router import Routing


class Block(nnx.Module):
    def __init__(self, config: ModelConfig, *, moe: bool, rngs: nnx.Rngs):
        self.attention = Attention(config, rngs=rngs)
        if moe:
            self.moe = MoELayer(config, rngs=rngs)
        else:
            self.mlp = MLP(config.d_model, config.dense_width, config.init_std, rngs=rngs)
        self.is_moe = moe
        if config.norm_placement in (NormPlacement.peri, NormPlacement.pre):
            self.attention_in_norm = RMSNorm(config.d_model, config.norm_eps)
            self.mlp_in_norm = RMSNorm(config.d_model, config.norm_eps)
        if config.norm_placement in (NormPlacement.peri, NormPlacement.reordered):
            self.attention_out_norm = RMSNorm(config.d_model, config.norm_eps)
            self.mlp_out_norm = RMSNorm(config.d_model, config.norm_eps)

    def _norm(self, name: str, x: Array) -> Array:
        return getattr(self, name)(x) if hasattr(self, name) else x

    def __call__(
        self, x: Float[Array, "B S D"], context: Context, window: Int[Array, ""]
    ) -> tuple[Float[Array, "B S D"], Auxiliary | None]:
        """Returns the block's output and, of an MoE block, its losses and routing statistics."""
        return self.around(lambda inside: self.attention(inside, context, window), x, context)

    def around(
        self, attend: Callable[[Array], Array], x: Float[Array, "B S D"], context: Context
    ) -> tuple[Float[Array, "B S D"], Auxiliary | None]:
        """The block around a given attention, [B, S, D] to [B, S, D]: decoding has one with a cache."""
        h = self._attended(attend, x)
        with jax.named_scope("moe" if self.is_moe else "mlp"):
            inside = self._norm("mlp_in_norm", h)
            if self.is_moe:
                out_TD, auxiliary = self.moe(inside.reshape(-1, inside.shape[-1]), context)
                out = out_TD.reshape(h.shape)
            else:
                out, auxiliary = self.mlp(inside, quantised_mlp(context, "mlp")), None
            return h + self._norm("mlp_out_norm", out).astype(jnp.result_type(h)), auxiliary

    def route(self, x: Float[Array, "B S D"], context: Context, window: Int[Array, ""]) -> Routing:
        """Where an MoE block sends the tokens of its input."""
        h = self._attended(lambda inside: self.attention(inside, context, window), x)
        inside = self._norm("mlp_in_norm", h)
        return self.moe.router(inside.reshape(-1, inside.shape[-1]), context)

    def _attended(self, attend: Callable[[Array], Array], x: Array) -> Array:
        with jax.named_scope("attention"):
            return x + self._norm("attention_out_norm", attend(self._norm("attention_in_norm", x)))
