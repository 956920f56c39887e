"""Both ends of the network: token embedding, and the head that turns activations into a loss.

    ids_BS --table--> * scale --norm--> x_BSD  ...blocks...  x_BSD --norm--> logits_BSV --> sum of cross entropy + z

Logits are fp32 and never stand whole in memory: the loss and its gradient are computed over runs of tokens at once,
since the loss is a scalar and its gradient is known in the same pass (as fused linear cross entropy kernels do).
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jaxtyping import Float, Int

from moejax.config import ModelConfig
from moejax.models.norms import RMSNorm
from moejax.models.parameters import weight

IGNORED = -100  # the label of a token that has no loss
LOGIT_BYTES = 128 * 2**20  # fp32 logits alive at a time


class Embedding(nnx.Module):
    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.table = weight(rngs, config.init_std, (config.vocab_size, config.d_model), ("vocab", "embed"))
        self.scale = math.sqrt(config.d_model) if config.embed_scale is None else config.embed_scale
        if config.embed_norm:
            self.norm = RMSNorm(config.d_model, config.norm_eps)

    def __call__(self, ids_BS: Int[Array, "B S"], dtype: Any = jnp.float32) -> Float[Array, "B S D"]:
        # fp32 through scale and norm, so that the gradient's scatter-add over repeated tokens is fp32 too
        x = jnp.take(self.table[...].astype(jnp.float32), ids_BS, axis=0) * self.scale
        if hasattr(self, "norm"):
            x = self.norm(x)
        return x.astype(dtype)


class HeadLoss(NamedTuple):
    """Sums over this device's non-ignored tokens, fp32: cross entropy in nats, and squared log-sum-exps."""

    cross_entropy: Float[Array, ""]
    z: Float[Array, ""]


class Head(nnx.Module):
    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.norm = RMSNorm(config.d_model, config.norm_eps)
        self.tied = config.tie_embeddings
        self.z_weight = config.z_loss
        if not self.tied:
            self.w = weight(rngs, config.init_std, (config.d_model, config.vocab_size), ("embed", "vocab"))

    def weight_DV(self, embedding: Embedding) -> Float[Array, "D V"]:
        return embedding.table[...].T if self.tied else self.w[...]

    def logits(self, x: Float[Array, "*batch D"], embedding: Embedding) -> Float[Array, "*batch V"]:
        w_DV = self.weight_DV(embedding).astype(x.dtype)
        return jnp.matmul(self.norm(x), w_DV, preferred_element_type=jnp.float32)

    def loss(
        self, x: Float[Array, "B S D"], labels_BS: Int[Array, "B S"], embedding: Embedding
    ) -> tuple[Array, HeadLoss]:
        """(sum of cross entropy + z_weight * sum of squared log-sum-exps over non-ignored labels, the two sums)."""
        x_TD = self.norm(x).reshape(-1, x.shape[-1])
        w_DV = self.weight_DV(embedding).astype(x.dtype)
        return linear_cross_entropy(x_TD, w_DV, labels_BS.reshape(-1), self.z_weight)


def _chunk_loss(x_TD: Array, w_DV: Array, labels_T: Array, z_weight: float) -> tuple[Array, HeadLoss]:
    logits_TV = jnp.matmul(x_TD, w_DV, preferred_element_type=jnp.float32)
    log_sum_T = jax.nn.logsumexp(logits_TV, axis=-1)
    counted_T = labels_T != IGNORED
    label_T = jnp.where(counted_T, labels_T, 0)
    picked_T = jnp.take_along_axis(logits_TV, label_T[:, None], axis=-1)[:, 0]
    ce = jnp.sum(jnp.where(counted_T, log_sum_T - picked_T, 0.0))
    z = jnp.sum(jnp.where(counted_T, log_sum_T**2, 0.0))
    return ce + z_weight * z, HeadLoss(ce, z)


def chunk_tokens(tokens: int, vocab: int) -> int:
    """Largest divisor of `tokens` whose fp32 logits fit in LOGIT_BYTES."""
    most = max(1, LOGIT_BYTES // (4 * vocab))
    return max(n for n in range(1, tokens + 1) if tokens % n == 0 and n <= most)


def _chunked(x_TD: Array, labels_T: Array, vocab: int) -> tuple[Array, Array]:
    tokens, width = x_TD.shape
    run = chunk_tokens(tokens, vocab)
    return x_TD.reshape(tokens // run, run, width), labels_T.reshape(tokens // run, run)


@jax.custom_vjp
def linear_cross_entropy(
    x_TD: Float[Array, "T D"], w_DV: Float[Array, "D V"], labels_T: Int[Array, "T"], z_weight: float
) -> tuple[Float[Array, ""], HeadLoss]:
    """sum_t [lse(x_t w) - (x_t w)_label + z_weight lse(x_t w)^2] over labels != IGNORED, fp32, and its parts.

    Only the first output has a gradient. Peak extra memory: LOGIT_BYTES of logits, and an fp32 gradient of w.
    """
    chunks = _chunked(x_TD, labels_T, w_DV.shape[1])
    totals = lax.map(lambda c: _chunk_loss(c[0], w_DV, c[1], z_weight), chunks)
    return jax.tree.map(jnp.sum, totals)


def _forward(x_TD: Array, w_DV: Array, labels_T: Array, z_weight: float) -> tuple[Any, Any]:
    def step(grad_w: Array, chunk: tuple[Array, Array]) -> tuple[Array, Any]:
        x, labels = chunk
        loss, pull, parts = jax.vjp(lambda x, w: _chunk_loss(x, w, labels, z_weight), x, w_DV, has_aux=True)
        dx, dw = pull(jnp.ones_like(loss))
        return grad_w + dw.astype(jnp.float32), (loss, parts, dx)

    grad_w, (loss, parts, grad_x) = lax.scan(
        step, jnp.zeros(w_DV.shape, jnp.float32), _chunked(x_TD, labels_T, w_DV.shape[1])
    )
    return jax.tree.map(jnp.sum, (loss, parts)), (grad_x.reshape(x_TD.shape), grad_w.astype(w_DV.dtype))


def _backward(residuals: Any, cotangents: Any) -> tuple[Array, Array, None, None]:
    grad_x, grad_w = residuals
    scale, _ = cotangents
    return (grad_x * scale).astype(grad_x.dtype), (grad_w * scale).astype(grad_w.dtype), None, None


linear_cross_entropy.defvjp(_forward, _backward)
