"""The whole layer: what it adds up, what it counts, and that all it holds is accounted for."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moejax import config as c
from moejax.accounting import block_parameters
from moejax.context import single_device_context
from moejax.models.block import Block
from moejax.moe.layer import MoELayer
from moejax.moe.shared import MixedSharedExperts
from moejax.moe.statistics import RouterStatistics, merge, reduce_over_devices, zero_statistics
from tests.moe import oracle

T, D, E, K = 10, 6, 4, 2
MODEL = c.ModelConfig(
    d_model=D,
    init_std=0.5,
    attention=c.AttentionConfig(n_heads=2, n_kv_heads=1, head_dim=4),
    moe=c.MoEConfig(num_experts=E, top_k=K, hidden=5, shared_hidden=0),
)


def make(kind, model: c.ModelConfig, **more):
    with nnx.use_eager_sharding(False):
        return kind(model, rngs=nnx.Rngs(0), **more)


def with_moe(**fields) -> c.ModelConfig:
    return replace(MODEL, moe=replace(MODEL.moe, **fields))


def test_routed_experts_equal_the_dense_oracle_and_statistics_count():
    layer, x = make(MoELayer, MODEL), jax.random.normal(jax.random.key(1), (T, D))
    segments = jnp.zeros((1, T), jnp.int32).at[0, 7:].set(-1)
    y, auxiliary = jax.jit(lambda x: layer(x, single_device_context(segments)))(x)
    routing = layer.router(x, single_device_context(segments))
    ids, weights = np.asarray(routing.expert_ids), np.asarray(routing.weights)
    experts = layer.experts.weights(jnp.float32)
    case = oracle.Case(np.asarray(x), ids, weights, *map(np.asarray, experts), np.zeros((T, D)), ids < E)
    np.testing.assert_allclose(y, oracle.dense(case).y, rtol=1e-5, atol=1e-6)
    found = auxiliary.statistics
    np.testing.assert_array_equal(found.counts, np.bincount(ids[ids < E], minlength=E))
    np.testing.assert_allclose(np.sum(found.scores), 7, rtol=1e-6)
    np.testing.assert_allclose(found.margin, np.sum(np.asarray(routing.margin)[:7]), rtol=1e-5)
    assert (found.exchanges, found.rounds, found.dropped) == (1, 1, 0)
    np.testing.assert_allclose(found.occupancy, 7 * K / (T * K))


def test_shared_experts_are_mixed_by_their_router():
    mixed = make(MixedSharedExperts, with_moe(shared_hidden=3, shared_experts=2))
    x = jax.random.normal(jax.random.key(2), (T, D))
    w, up_gate, down = (np.asarray(v[...], np.float64) for v in (mixed.router_w, mixed.w_up_gate, mixed.w_down))
    p = 1 / (1 + np.exp(-np.asarray(x, np.float64) @ w))
    p /= p.sum(1, keepdims=True)
    expected = np.zeros((T, D))
    for g in range(2):
        up, gate = np.split(np.asarray(x, np.float64) @ up_gate[g], 2, axis=1)
        expected += p[:, g : g + 1] * ((up * gate / (1 + np.exp(-gate))) @ down[g])
    np.testing.assert_allclose(jax.jit(mixed)(x), expected, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize(
    "fields", [{}, dict(shared_hidden=3), dict(shared_hidden=3, shared_experts=2, router=c.RouterConfig(bias=True))]
)
def test_every_weight_is_accounted_for(fields: dict):
    model = with_moe(**fields)
    block = nnx.eval_shape(lambda: make(Block, model, moe=True))
    assert sum(x.size for x in jax.tree.leaves(nnx.state(block))) == block_parameters(model, layer=1).total


def test_statistics_merge():
    """Sums add up and the occupancy is the fullest, over microbatches as over devices."""
    zero = jax.tree.map(lambda x: x[0], zero_statistics(E, 1))
    a = RouterStatistics(*(jnp.full_like(x, 2.0) for x in zero))
    b = RouterStatistics(*(jnp.full_like(x, 3.0) for x in zero))
    both = merge(a, b)
    assert both.occupancy == 3 and both.dropped == 5
    np.testing.assert_array_equal(both.counts, np.full(E, 5.0))
    double, largest = lambda t: jax.tree.map(lambda x: 2 * x, t), lambda t: jax.tree.map(lambda x: x + 1, t)
    over = reduce_over_devices(both, double, largest)
    assert over.occupancy == 4 and over.dropped == 10
