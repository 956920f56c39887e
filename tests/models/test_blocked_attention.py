"""Attention by blocks is attention: values and gradients of the masked softmax, for any length, grouping and window."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.config import FULL_ATTENTION
from moejax.models.attention import attention_mask
from moejax.models.blocked_attention import SCORE_BYTES, block_length, blocked_attention


def operands(length: int, heads: int = 4, kv_heads: int = 2, width: int = 8, batch: int = 2):
    keys = jax.random.split(jax.random.key(length), 4)
    q = jax.random.normal(keys[0], (batch, length, heads, width))
    k, v = (jax.random.normal(key, (batch, length, kv_heads, width)) for key in keys[1:3])
    # documents of unequal length, another cut in each sequence, padding at the end
    segments = jnp.sort(jax.random.randint(keys[3], (batch, length), 0, 3), axis=1)
    return q, k, v, segments.at[:, -2:].set(-1)


@pytest.mark.parametrize(("length", "block", "window"), [(24, 8, None), (21, 8, FULL_ATTENTION), (21, 4, 5), (7, 8, 3)])
def test_values_and_gradients_are_those_of_the_whole_softmax(length, block, window):
    q, k, v, segments = operands(length)
    reach = None if window is None else jnp.asarray(window, jnp.int32)
    cotangent = jax.random.normal(jax.random.key(1), q.shape)

    def whole(q, k, v):
        mask = attention_mask(segments, reach)
        return jax.nn.dot_product_attention(q, k, v, mask=mask, implementation="xla")

    with jax.default_matmul_precision("highest"):
        expected, pull = jax.vjp(whole, q, k, v)
        got, pull_blocks = jax.vjp(lambda q, k, v: blocked_attention(q, k, v, segments, reach, block), q, k, v)
        np.testing.assert_allclose(got, expected, atol=2e-6)
        for mine, theirs in zip(pull_blocks(cotangent), pull(cotangent), strict=True):
            np.testing.assert_allclose(mine, theirs, atol=1e-5)


def test_no_array_holds_all_scores():
    q, k, v, segments = operands(256)

    def loss(q, k, v):
        return jnp.sum(blocked_attention(q, k, v, segments, None, 32) ** 2)

    text = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(q, k, v).as_text()
    assert "32x32x" in text and "256x256" not in text


@pytest.mark.parametrize(("batch", "length", "heads"), [(1, 8192, 64), (2, 8192, 16), (1, 100, 4), (1, 1, 1)])
def test_blocks_are_as_large_as_the_budget_allows(batch, length, heads):
    block = block_length(batch, length, heads)
    fits = lambda n: 4 * batch * heads * n * n <= SCORE_BYTES  # noqa: E731
    assert fits(block) and (block >= length or not fits(2 * block))
