"""Attention without the S x S scores: blocks of queries against blocks of keys, the softmax kept up as they pass.

    q_BSNH, k_BSMH, v_BSMH --for each pair of blocks: scores, running maximum and sum--> y_BSNH, lse for the backward
    backward: scores of each pair again from q, k and lse --> dq, dk, dv

FlashAttention (Dao et al. 2022, arXiv:2205.14135) in plain JAX: what is kept is y and one number for each query and
head, what lives for a moment is one block of scores, at most SCORE_BYTES. Pairs wholly above the diagonal are left out,
so the work is that of causal attention. It runs everywhere and takes any mask of documents and windows. It is what a
program compiled for absent GPUs has in the place of cuDNN's kernel, which cannot be compiled without cuDNN
(docs/decisions/005-attention-of-absent-gpus.md).

Letters: N query heads, M kv heads, G = N / M of them to a kv head, H head width, s and t positions within a block.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Bool, Float, Int

from moejax.config import FULL_ATTENTION

SCORE_BYTES = 64 * 2**20  # fp32 scores of one pair of blocks
NEVER = -1e30  # a score that no softmax sees; finite, so that a block without a key to look at makes no NaN


def block_length(batch: int, length: int, heads: int) -> int:
    """Positions of a block: a power of two whose fp32 scores fit in SCORE_BYTES, at most the sequence rounded up."""
    most = max(1, math.isqrt(SCORE_BYTES // (4 * batch * heads)))
    return min(2 ** (most.bit_length() - 1), 2 ** (length - 1).bit_length())


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def blocked_attention(
    q: Float[Array, "B S N H"],
    k: Float[Array, "B S M H"],
    v: Float[Array, "B S M H"],
    segment_ids: Int[Array, "B S"],
    window: Int[Array, ""] | None,
    block: int,
) -> Float[Array, "B S N H"]:
    """softmax(q k^T / sqrt(H) + mask) v in the dtype of q, scores and sums in fp32.

    Query s sees key t of its own segment with 0 <= s - t, and s - t < window where there is one (`FULL_ATTENTION`:
    none). block: positions of a block, see `block_length`. Differentiable once in q, k and v.
    """
    return _forward(q, k, v, segment_ids, window, block)[0]


class _Blocks(NamedTuple):
    """q: [n, B, M, G, b, H]. k, v: [n, B, M, b, H]. segments: [n, B, b]. A row for each of n blocks of b positions."""

    q: Array
    k: Array
    v: Array
    segments: Array


def _split(q: Array, k: Array, v: Array, segment_ids: Array, block: int) -> _Blocks:
    return _Blocks(
        _queries(q, k.shape[2], block),
        _keys(k, block),
        _keys(v, block),
        _padded(segment_ids, block).reshape(segment_ids.shape[0], -1, block).swapaxes(0, 1),
    )


def _padded(x: Array, block: int) -> Array:
    """Positions added at the end, which no query looks at: every one of them comes after it."""
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % block), *[(0, 0)] * (x.ndim - 2)))


def _queries(x: Float[Array, "B S N H"], kv_heads: int, block: int) -> Float[Array, "n B M G b H"]:
    batch, _, heads, width = x.shape
    return _padded(x, block).reshape(batch, -1, block, kv_heads, heads // kv_heads, width).transpose(1, 0, 3, 4, 2, 5)


def _keys(x: Float[Array, "B S M H"], block: int) -> Float[Array, "n B M b H"]:
    batch, _, heads, width = x.shape
    return _padded(x, block).reshape(batch, -1, block, heads, width).transpose(1, 0, 3, 2, 4)


def _joined(x: Array, length: int) -> Float[Array, "B S N H"]:
    """The inverse of `_queries` and, with a G axis of one, of `_keys`."""
    n, batch, kv_heads, group, block, width = x.shape
    return x.transpose(1, 0, 4, 2, 3, 5).reshape(batch, n * block, kv_heads * group, width)[:, :length]


def _pairs(blocks: int, by_key: bool) -> tuple[np.ndarray, np.ndarray]:
    """(query block, key block) of every pair on or below the diagonal; by query, or by key."""
    query, key = np.tril_indices(blocks)
    order = np.lexsort((query, key)) if by_key else np.arange(len(query))
    return query[order].astype(np.int32), key[order].astype(np.int32)


def _scores(
    blocks: _Blocks, query: Array, key: Array, window: Array | None
) -> tuple[Float[Array, "B M G s t"], Bool[Array, "B 1 1 s t"]]:
    """Scores of one pair of blocks, fp32, and which of them count."""
    q, k, block = blocks.q[query], blocks.k[key], blocks.q.shape[4]
    scores = jnp.einsum("bmgsh,bmth->bmgst", q, k, preferred_element_type=jnp.float32) / math.sqrt(q.shape[-1])
    distance = (query - key) * block + jnp.arange(block)[:, None] - jnp.arange(block)[None, :]
    near = distance >= 0
    if window is not None:
        near &= (window == FULL_ATTENTION) | (distance < window)
    seen = near & (blocks.segments[query][:, :, None] == blocks.segments[key][:, None, :])
    return scores, seen[:, None, None]


def _forward(
    q: Array, k: Array, v: Array, segment_ids: Array, window: Array | None, block: int
) -> tuple[Array, Float[Array, "n B M G b"]]:
    blocks = _split(q, k, v, segment_ids, block)
    shape = blocks.q.shape[1:-1]

    def step(carry: Any, pair: tuple[Array, Array]) -> tuple[Any, None]:
        y_all, lse_all, y, peak, total = carry
        query, key = pair
        first = key == 0  # pairs come by query: a new one begins
        y, total = jnp.where(first, 0.0, y), jnp.where(first, 0.0, total)
        peak = jnp.where(first, NEVER, peak)
        scores, seen = _scores(blocks, query, key, window)
        higher = jnp.maximum(peak, jnp.max(jnp.where(seen, scores, NEVER), axis=-1))
        weights = jnp.where(seen, jnp.exp(scores - higher[..., None]), 0.0)
        fade = jnp.exp(peak - higher)
        total = total * fade + jnp.sum(weights, axis=-1)
        more = jnp.einsum(
            "bmgst,bmth->bmgsh", weights.astype(v.dtype), blocks.v[key], preferred_element_type=jnp.float32
        )
        y = y * fade[..., None] + more
        safe = jnp.maximum(total, jnp.finfo(jnp.float32).tiny)
        y_all = lax.dynamic_update_index_in_dim(y_all, (y / safe[..., None]).astype(y_all.dtype), query, 0)
        lse_all = lax.dynamic_update_index_in_dim(lse_all, higher + jnp.log(safe), query, 0)
        return (y_all, lse_all, y, higher, total), None

    zero = jnp.zeros(shape, jnp.float32)
    start = (
        jnp.zeros_like(blocks.q),
        jnp.zeros((len(blocks.q), *shape), jnp.float32),
        jnp.zeros(blocks.q.shape[1:], jnp.float32),
        zero,
        zero,
    )
    (y, lse, *_), _ = lax.scan(step, start, _pairs(len(blocks.q), by_key=False))
    # a region that recompute policies know by name: with both kept, attention does not run again
    return checkpoint_name(_joined(y, q.shape[1]), "attention"), checkpoint_name(lse, "attention")


def _keep(q: Array, k: Array, v: Array, segment_ids: Array, window: Array | None, block: int) -> tuple[Array, Any]:
    y, lse = _forward(q, k, v, segment_ids, window, block)
    return y, (q, k, v, segment_ids, window, y, lse)


def _backward(block: int, kept: Any, dy: Float[Array, "B S N H"]) -> Any:
    q, k, v, segment_ids, window, y, lse = kept
    blocks = _split(q, k, v, segment_ids, block)
    scale = 1 / math.sqrt(q.shape[-1])
    grads = _queries(dy, k.shape[2], block)
    # sum over keys of weight * its gradient, known from y alone
    delta = jnp.sum(grads.astype(jnp.float32) * _queries(y, k.shape[2], block).astype(jnp.float32), axis=-1)

    def step(carry: Any, pair: tuple[Array, Array]) -> tuple[Any, None]:
        dq_all, dk_all, dv_all, dk, dv = carry
        query, key = pair
        first = query == key  # pairs come by key: a new one begins
        dk, dv = jnp.where(first, 0.0, dk), jnp.where(first, 0.0, dv)
        scores, seen = _scores(blocks, query, key, window)
        weights = jnp.where(seen, jnp.exp(scores - lse[query][..., None]), 0.0)
        dy = grads[query]
        dv = dv + jnp.einsum("bmgst,bmgsh->bmth", weights.astype(dy.dtype), dy, preferred_element_type=jnp.float32)
        d_weights = jnp.einsum("bmgsh,bmth->bmgst", dy, blocks.v[key], preferred_element_type=jnp.float32)
        d_scores = (weights * (d_weights - delta[query][..., None]) * scale).astype(q.dtype)
        dk = dk + jnp.einsum("bmgst,bmgsh->bmth", d_scores, blocks.q[query], preferred_element_type=jnp.float32)
        more = jnp.einsum("bmgst,bmth->bmgsh", d_scores, blocks.k[key], preferred_element_type=jnp.float32)
        dq_all = dq_all.at[query].add(more)
        dk_all = lax.dynamic_update_index_in_dim(dk_all, dk.astype(dk_all.dtype), key, 0)
        dv_all = lax.dynamic_update_index_in_dim(dv_all, dv.astype(dv_all.dtype), key, 0)
        return (dq_all, dk_all, dv_all, dk, dv), None

    zero = jnp.zeros(blocks.k.shape[1:], jnp.float32)
    start = (jnp.zeros(blocks.q.shape, jnp.float32), jnp.zeros_like(blocks.k), jnp.zeros_like(blocks.v), zero, zero)
    (dq, dk, dv, *_), _ = lax.scan(step, start, _pairs(len(blocks.q), by_key=True))
    length = q.shape[1]
    return _joined(dq, length).astype(q.dtype), *(_joined(d[:, :, :, None], length) for d in (dk, dv)), None, None


blocked_attention.defvjp(_keep, _backward)
