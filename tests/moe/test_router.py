"""The router against plain numpy, option by option, and what must hold whatever the options are."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from moejax import config as c
from moejax.context import Context, single_device_context
from moejax.errors import UserError
from moejax.moe.router import Router, Routing
from moejax.moe.selection import move_score_bias

B, S, D, E, K = 2, 6, 5, 8, 2


def make(options: dict, seed: int = 0) -> Router:
    model = c.ModelConfig(
        d_model=D, init_std=1.0, moe=c.MoEConfig(num_experts=E, top_k=K, router=c.RouterConfig(**options))
    )
    c.validate(c.Config(model=replace(c.ModelConfig(), moe=model.moe)))
    with nnx.use_eager_sharding(False):
        return Router(model, rngs=nnx.Rngs(seed))


def a_context(
    seed: int = 0, *, bias: np.ndarray | None = None, segments: np.ndarray | None = None, **fields
) -> Context:
    segments = np.zeros((B, S), np.int32) if segments is None else segments
    context = single_device_context(jnp.asarray(segments))
    return replace(context, key=jax.random.key(seed), score_bias=None if bias is None else jnp.asarray(bias), **fields)


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def numpy_router(
    options: dict, w: np.ndarray, b: np.ndarray, x: np.ndarray, bias: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """ids, weights: section 2.1 of the original, token by token."""
    o = c.RouterConfig(**options)
    logits = x @ w + (b if o.bias else 0)
    scores = 1 / (1 + np.exp(-logits)) + 1e-7 if o.gating == c.Gating.sigmoid else softmax(logits)
    chosen_by = (logits if o.gating == c.Gating.topk_softmax else scores).copy()
    if o.score_bias != c.ScoreBias.none:
        chosen_by += bias
    ids, weights = np.zeros((len(x), K), int), np.zeros((len(x), K))
    for t, row in enumerate(chosen_by):
        if o.groups > 1:
            groups = row.reshape(o.groups, -1)
            best = np.argsort(-np.sort(groups, axis=1)[:, -2:].sum(1), kind="stable")[: o.top_groups]
            outside = np.repeat(~np.isin(np.arange(o.groups), best), E // o.groups)
            row = np.where(outside, -np.inf, row)
        ids[t] = np.argsort(-row, kind="stable")[:K]
        weights[t] = softmax(logits[t, ids[t]]) if o.gating == c.Gating.topk_softmax else scores[t, ids[t]]
    if o.normalize is not None:
        weights /= np.sum(np.abs(weights) ** o.normalize, axis=1, keepdims=True) ** (1 / o.normalize)
    weights *= (K if o.restore_scale else 1) * o.weight_scale
    return ids, weights * (np.sqrt(o.original_top_k / K) if o.original_top_k else 1)


OPTIONS = {
    "report recipe": {},
    "sigmoid, raw": dict(gating=c.Gating.sigmoid, normalize=None, restore_scale=False),
    "top-k softmax, biased logits": dict(gating=c.Gating.topk_softmax, bias=True, normalize=None),
    "top-k softmax, score bias": dict(gating=c.Gating.topk_softmax, score_bias=c.ScoreBias.fixed),
    "sigmoid, groups, score bias": dict(gating=c.Gating.sigmoid, groups=4, top_groups=2, score_bias=c.ScoreBias.fixed),
    "softmax, one group": dict(groups=2, top_groups=1),
    "2-norm, scaled, from a top-8 model": dict(normalize=2.0, weight_scale=2.5, original_top_k=8),
}


@pytest.mark.parametrize("name", OPTIONS)
@settings(max_examples=5)
@given(seed=st.integers(0, 2**32 - 1))
def test_equals_numpy(name: str, seed: int):
    router, rng = make(OPTIONS[name]), np.random.default_rng(seed)
    w, b = rng.standard_normal((D, E)), rng.standard_normal(E)
    x, bias = rng.standard_normal((B * S, D)), 0.3 * rng.standard_normal(E)
    router.w[...] = jnp.asarray(w, jnp.float32)
    if OPTIONS[name].get("bias"):
        router.b[...] = jnp.asarray(b, jnp.float32)
    routing = router(jnp.asarray(x, jnp.float32), a_context(bias=bias.astype(np.float32)))
    ids, weights = numpy_router(OPTIONS[name], w, b, x, bias)
    np.testing.assert_array_equal(routing.expert_ids, ids)
    np.testing.assert_allclose(routing.weights, weights, rtol=2e-5)
    np.testing.assert_allclose(np.sum(routing.scores, axis=-1), 1, rtol=1e-6)
    assert np.all(np.asarray(routing.margin) >= 0)


def some_x(seed: int = 0) -> jax.Array:
    return jax.random.normal(jax.random.key(100 + seed), (B * S, D))


def test_a_score_bias_chooses_and_does_not_weigh():
    """An expert that the bias lifts is chosen by all; its weight is what its score says; it gets no gradient through
    it."""
    router = make(dict(score_bias=c.ScoreBias.fixed, normalize=None, restore_scale=False))
    bias = np.zeros(E, np.float32)
    bias[5] = 10
    routing = router(some_x(), a_context(bias=bias))
    assert np.all(np.asarray(routing.expert_ids)[:, 0] == 5)
    np.testing.assert_allclose(routing.weights[:, 0], routing.scores[:, 5], rtol=1e-6)
    gradient = jax.grad(lambda bias: jnp.sum(router(some_x(), a_context(bias=bias)).weights))(jnp.asarray(bias))
    np.testing.assert_array_equal(gradient, 0)


def test_padding_goes_nowhere():
    segments = np.zeros((B, S), np.int32)
    segments[0, 3:] = -1
    ids = np.asarray(make({})(some_x(), a_context(segments=segments)).expert_ids).reshape(B, S, K)
    assert np.all(ids[0, 3:] == E) and np.all(ids[0, :3] < E) and np.all(ids[1] < E)


def test_round_robin_is_even():
    ids = np.asarray(make(dict(assignment=c.Assignment.uniform))(some_x(), a_context()).expert_ids)
    assert np.ptp(np.bincount(ids.reshape(-1), minlength=E)) == 0


def half(routing: Routing, i: int) -> Routing:
    return jax.tree.map(lambda x: x[i * S : (i + 1) * S], routing)


@pytest.mark.parametrize(
    "options",
    [
        dict(assignment=c.Assignment.random),
        dict(jitter=0.3),
        dict(pool=c.PoolConfig(smallest=2, largest=6)),
    ],
    ids=["random", "jitter", "pools"],
)
def test_draws_are_the_same_on_every_split(options: dict):
    """A sequence alone, as a device of a larger mesh sees it, is routed as in the whole; another key routes
    otherwise."""
    router, x = make(options), some_x()
    segments = np.repeat([[0, 1]], B, 0).repeat(S // 2, axis=1).astype(np.int32)
    whole = router(x, a_context(segments=segments, training=True))
    for i in range(B):
        alone = a_context(segments=segments[i : i + 1], training=True)
        part = router(x[i * S : (i + 1) * S], replace(alone, sequence_ids=jnp.array([i])))
        np.testing.assert_array_equal(part.expert_ids, half(whole, i).expert_ids)
        np.testing.assert_allclose(part.weights, half(whole, i).weights, rtol=1e-6)
    others = [router(x, a_context(seed, segments=segments, training=True)) for seed in range(1, 4)]
    assert any(not np.array_equal(other.weights, whole.weights) for other in others)


def test_jitter_is_of_training_alone_and_of_its_size():
    router, plain, x = make(dict(jitter=0.1)), make({}), some_x()
    np.testing.assert_array_equal(router(x, a_context()).logits, plain(x, a_context()).logits)
    spread = np.abs(np.asarray(router(x, a_context(training=True)).logits) - np.asarray(plain(x, a_context()).logits))
    bound = 0.1 * np.abs(np.asarray(x)) @ np.abs(np.asarray(plain.w[...]))
    assert np.all(spread <= bound + 1e-5) and np.any(spread > 0)


def test_a_document_stays_in_its_pool():
    """All tokens of a document together reach the experts that its summed scores rank highest, and no others."""
    size = 3
    router = make(dict(pool=c.PoolConfig(smallest=2, largest=6, evaluation=size)))
    segments = np.array([[4, 4, 7, 7, 7, -1], [0, 0, 0, 0, 1, 1]], np.int32)
    x = some_x(3)
    routing = router(x, a_context(segments=segments))
    ids, scores = (np.asarray(v).reshape(B, S, -1) for v in (routing.expert_ids, routing.scores))
    for b in range(B):
        for document in set(segments[b]) - {-1}:
            inside = segments[b] == document
            pool = set(np.argsort(-scores[b, inside].sum(0), kind="stable")[:size].tolist())
            assert set(ids[b, inside].reshape(-1).tolist()) <= pool


def test_the_score_bias_moves_against_the_load():
    counts = jnp.array([[4.0, 0.0, 2.0, 2.0], [1.0, 1.0, 1.0, 1.0]])
    moved = move_score_bias(jnp.zeros((2, 4)), counts, 0.5)
    np.testing.assert_array_equal(moved, [[-0.5, 0.5, 0, 0], [0, 0, 0, 0]])


def test_the_margin_is_the_lead_over_the_next():
    routing = make({})(some_x(), a_context())
    ranked = -np.sort(-np.asarray(routing.scores), axis=1)
    np.testing.assert_allclose(routing.margin, ranked[:, K - 1] - ranked[:, K], atol=1e-7)


REFUSED = {
    "groups that do not divide": (dict(groups=3, top_groups=2), "groups=3"),
    "more groups than there are": (dict(groups=2, top_groups=3), "top_groups=3"),
    "k beyond the reachable": (dict(groups=8, top_groups=1), "reach more groups"),
    "top_groups alone": (dict(top_groups=2), "top_groups=2"),
    "top-k softmax with groups": (dict(gating=c.Gating.topk_softmax, groups=4, top_groups=2), "topk_softmax"),
    "top-k softmax with random": (dict(gating=c.Gating.topk_softmax, assignment=c.Assignment.random), "random"),
    "bias that steers nothing": (dict(score_bias=c.ScoreBias.sign, assignment=c.Assignment.uniform), "score_bias"),
    "pools below k": (dict(pool=c.PoolConfig(smallest=1, largest=4)), "smallest=1"),
    "pools with groups": (dict(pool=c.PoolConfig(2, 4), groups=4, top_groups=2), "pool"),
    "jitter that flips signs": (dict(jitter=1.5), "jitter=1.5"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_impossible_combinations_are_refused(name: str):
    options, word = REFUSED[name]
    with pytest.raises(UserError, match=word):
        make(options)
