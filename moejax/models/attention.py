"""Attention: grouped queries, QK norm, rotary positions, documents and windows kept apart by one mask.

    x_BSD --w_qkv (+ b_qkv)--> q_BSNH, k_BSMH, v_BSMH --QK norm, rotary-->
    softmax(q k^T / sqrt(H) + mask) v --w_out--> y_BSD

Letters: N query heads, M kv heads, H head width, Q = N + 2M heads of the packed projection.
"""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.extend import backend
from jaxtyping import Bool, Float, Int

from moejax.config import FULL_ATTENTION, AttentionImplementation, ModelConfig, QKNorm
from moejax.context import Context
from moejax.models.blocked_attention import block_length, blocked_attention
from moejax.models.norms import RMSNorm
from moejax.models.parameters import weight, zeros
from moejax.models.quantised import mx_linear, unless


def rotary(x: Float[Array, "B S N H"], positions: Int[Array, "B S"], theta: float) -> Float[Array, "B S N H"]:
    """Half-rotation rotary embedding in fp32: concat(x1 cos - x2 sin, x2 cos + x1 sin), angles p * theta^(-2i/H)."""
    half = x.shape[-1] // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = positions[:, :, None, None].astype(jnp.float32) * frequency
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    x1, x2 = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1).astype(x.dtype)


def attention_mask(segment_ids: Int[Array, "B S"], window: Int[Array, ""] | None) -> Bool[Array, "B 1 S S"]:
    """True where query s may look at key t of its own document: 0 <= s - t, and s - t < window if there is one."""
    length = segment_ids.shape[1]
    distance = jnp.arange(length)[:, None] - jnp.arange(length)[None, :]
    near = distance >= 0
    if window is not None:
        near &= (window == FULL_ATTENTION) | (distance < window)
    return (near & (segment_ids[:, :, None] == segment_ids[:, None, :]))[:, None]


def choose_implementation(wanted: AttentionImplementation, dtype: Any) -> Literal["xla", "cudnn", "blocks"]:
    """`auto` is cuDNN's flash attention on a GPU in bf16, blocks for a GPU that is not there, XLA's everywhere else."""
    if wanted != AttentionImplementation.auto:
        return wanted.value
    if jax.default_backend() == "gpu":
        return "cudnn" if dtype == jnp.bfloat16 else "xla"
    # a program is compiled for its default device, which may be a GPU that this process does not have
    return "blocks" if backend.get_default_device().platform in ("cuda", "gpu") else "xla"


class Attention(nnx.Module):
    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        c = config.attention
        self.config = c
        self.windowed = bool(c.window_pattern)
        packed = c.n_heads + 2 * c.n_kv_heads
        self.w_qkv = weight(rngs, config.init_std, (config.d_model, packed, c.head_dim), ("embed", "heads", "head"))
        self.w_out = weight(rngs, config.init_std, (c.n_heads, c.head_dim, config.d_model), ("heads", "head", "embed"))
        if c.qkv_bias:
            self.b_qkv = zeros((packed, c.head_dim), ("heads", "head"))
        if c.qk_norm != QKNorm.none:
            full = c.qk_norm == QKNorm.full
            self.q_norm = RMSNorm(c.head_dim * (c.n_heads if full else 1), config.norm_eps, "head")
            self.k_norm = RMSNorm(c.head_dim * (c.n_kv_heads if full else 1), config.norm_eps, "head")

    def project(
        self, x: Float[Array, "B S D"], positions: Int[Array, "B S"], context: Context | None = None
    ) -> tuple[Array, Array, Array]:
        """Queries [B,S,N,H], keys and values [B,S,M,H], normed and rotated. context: of weights in MXFP8."""
        c, w_qkv = self.config, self.w_qkv[...].astype(x.dtype)
        plain = lambda x, w: jnp.einsum("bsd,dqh->bsqh", x, w)  # noqa: E731
        qkv = _projected(plain, x, w_qkv, context, "w_qkv")
        if c.qkv_bias:
            qkv = qkv + self.b_qkv[...].astype(x.dtype)
        q, k, v = jnp.split(qkv, [c.n_heads, c.n_heads + c.n_kv_heads], axis=2)
        if c.qk_norm == QKNorm.head:
            q, k = self.q_norm(q), self.k_norm(k)
        elif c.qk_norm == QKNorm.full:
            q = self.q_norm(q.reshape(*q.shape[:2], -1)).reshape(q.shape)
            k = self.k_norm(k.reshape(*k.shape[:2], -1)).reshape(k.shape)
        return rotary(q, positions, c.rope_theta), rotary(k, positions, c.rope_theta), v

    def __call__(self, x: Float[Array, "B S D"], context: Context, window: Int[Array, ""]) -> Float[Array, "B S D"]:
        q, k, v = self.project(x, context.positions, context)
        implementation = choose_implementation(self.config.implementation, x.dtype)
        reach = window if self.windowed else None
        if implementation == "blocks":
            block = block_length(*q.shape[:3])
            y = blocked_attention(q, k, v, context.segment_ids, reach, block)
        else:
            mask = attention_mask(context.segment_ids, reach)
            y = jax.nn.dot_product_attention(q, k, v, mask=mask, implementation=implementation)
            y = checkpoint_name(y, "attention")  # a region that recompute policies know by name
        plain = lambda x, w: jnp.einsum("bsnh,nhd->bsd", x, w)  # noqa: E731
        return _projected(plain, y, self.w_out[...].astype(x.dtype), context, "w_out")


def _projected(plain: Callable[[Array, Array], Array], x: Array, w: Array, context: Context | None, name: str) -> Array:
    """plain(x, w), a product over all axes of x after [B, S]; in MXFP8 where the block's weight of this name is."""
    quantised = context.quantised_weight("attention", name) if context else None
    if context is None or context.recipe is None or quantised is None:
        return plain(x, w)
    recipe = context.recipe

    def in_mx(x: Array, w: Array) -> Array:
        y = mx_linear(x.reshape(*x.shape[:2], -1), w, quantised, recipe)
        return y.reshape(*x.shape[:2], *w.shape[x.ndim - 2 :])

    return unless(context.excluded, plain, in_mx, x, w)
