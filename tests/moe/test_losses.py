"""The balance loss and the z-loss: formulas against numpy, and what makes them losses and not metrics."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.config import BalanceGranularity
from moejax.context import single_device_context
from moejax.moe.losses import count_routes, load_balancing_loss, z_loss

B, S, E, K = 3, 8, 4, 2
LOCAL, INSTANCE, BATCH = BalanceGranularity.local, BalanceGranularity.instance, BalanceGranularity.batch


def a_batch(seed: int, padding: bool = True) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(ids [B, S, K], scores [B, S, E], valid [B, S])."""
    rng = np.random.default_rng(seed)
    scores = rng.random((B, S, E)).astype(np.float32)
    scores /= scores.sum(-1, keepdims=True)
    ids = np.argsort(-scores, axis=-1)[..., :K].astype(np.int32)
    valid = rng.random((B, S)) < 0.7 if padding else np.ones((B, S), bool)
    valid[:, 0] = True
    ids[~valid] = E
    return ids, scores, valid


def balance(
    granularity: BalanceGranularity, ids: np.ndarray, scores: jax.Array, valid: np.ndarray, tokens: int
) -> jax.Array:
    counts = count_routes(jnp.asarray(ids).reshape(-1, K), E, groups=len(ids))
    context = replace(single_device_context(jnp.where(valid, 0, -1)), batch_tokens=jnp.float32(tokens))
    return load_balancing_loss(granularity, counts, scores, jnp.asarray(valid), K, context)


def formula(ids: np.ndarray, scores: np.ndarray, valid: np.ndarray) -> float:
    """(E / K) sum_e n_e mean_t(p_te), over the valid tokens of one set of them."""
    counts = np.bincount(ids[valid].reshape(-1), minlength=E)
    return E / K * float(counts @ scores[valid].astype(np.float64).mean(0))


@pytest.mark.parametrize("seed", range(3))
def test_formulas(seed: int):
    ids, scores, valid = a_batch(seed)
    tokens = int(valid.sum())
    whole = formula(ids, scores, valid)
    np.testing.assert_allclose(balance(LOCAL, ids, scores, valid, tokens), whole, rtol=1e-5)
    np.testing.assert_allclose(balance(BATCH, ids, scores, valid, tokens), whole, rtol=1e-5)
    each = sum(formula(ids[b], scores[b], valid[b]) for b in range(B))
    np.testing.assert_allclose(balance(INSTANCE, ids, scores, valid, tokens), each, rtol=1e-5)


@pytest.mark.parametrize("granularity", BalanceGranularity)
def test_one_per_token_when_balanced(granularity: BalanceGranularity):
    ids = (np.arange(B * S * K) % E).reshape(B, S, K).astype(np.int32)
    scores, valid = np.full((B, S, E), 1 / E, np.float32), np.ones((B, S), bool)
    np.testing.assert_allclose(balance(granularity, ids, scores, valid, B * S) / (B * S), 1, rtol=1e-6)


@pytest.mark.parametrize("granularity", BalanceGranularity)
def test_padding_is_counted_nowhere(granularity: BalanceGranularity):
    """Whatever padding tokens score, NaN included, changes neither value nor gradient; and they get no gradient."""
    ids, scores, valid = a_batch(7)
    poisoned = np.where(valid[..., None], scores, np.nan)
    of = jax.value_and_grad(lambda s: balance(granularity, ids, s, valid, int(valid.sum())))
    value, gradient = of(jnp.asarray(scores))
    poisoned_value, poisoned_gradient = of(jnp.asarray(poisoned))
    np.testing.assert_array_equal(value, poisoned_value)
    np.testing.assert_array_equal(gradient, poisoned_gradient)
    assert np.all(np.asarray(gradient)[~valid] == 0)


def test_the_gradient_is_the_load():
    """d/dp_te = (E / K) n_e / tokens for every token: counts are constants."""
    ids, scores, valid = a_batch(2, padding=False)
    gradient = jax.grad(lambda s: balance(LOCAL, ids, s, valid, B * S))(jnp.asarray(scores))
    counts = np.bincount(ids.reshape(-1), minlength=E)
    np.testing.assert_allclose(gradient, np.broadcast_to(E / K * counts / (B * S), (B, S, E)), rtol=1e-5)


def test_batch_granularity_is_the_same_on_any_split():
    """Two devices that add up their counts have, together, the loss of one that sees all."""
    ids, scores, valid = a_batch(4)
    tokens = int(valid.sum())
    counts = np.bincount(ids[valid].reshape(-1), minlength=E).astype(np.float32)
    shares = []
    for part in (slice(0, 1), slice(1, B)):
        context = replace(
            single_device_context(jnp.where(valid[part], 0, -1)),
            batch_tokens=jnp.float32(tokens),
            sum_over_data=lambda _: jnp.asarray(counts),
        )
        here = count_routes(jnp.asarray(ids[part]).reshape(-1, K), E, groups=len(ids[part]))
        shares.append(load_balancing_loss(BATCH, here, jnp.asarray(scores[part]), jnp.asarray(valid[part]), K, context))
    np.testing.assert_allclose(sum(shares), balance(BATCH, ids, scores, valid, tokens), rtol=1e-5)


def test_z_loss():
    rng = np.random.default_rng(0)
    logits, valid = rng.standard_normal((6, E)).astype(np.float32), np.array([1, 1, 0, 1, 0, 1], bool)
    expected = np.sum(np.log(np.exp(logits[valid].astype(np.float64)).sum(-1)) ** 2)
    np.testing.assert_allclose(z_loss(jnp.asarray(logits), jnp.asarray(valid)), expected, rtol=1e-6)
    poisoned = np.where(valid[:, None], logits, np.inf)
    np.testing.assert_allclose(z_loss(jnp.asarray(poisoned), jnp.asarray(valid)), expected, rtol=1e-6)


def test_counts_leave_out_what_goes_nowhere():
    ids = jnp.array([[0, 1], [3, 4], [4, 4], [1, 3]])  # E = 4 is nowhere
    np.testing.assert_array_equal(count_routes(ids, E), [[1, 2, 0, 2]])
    np.testing.assert_array_equal(count_routes(ids, E, groups=2), [[1, 1, 0, 1], [0, 1, 0, 1]])
