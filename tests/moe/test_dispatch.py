"""Every transport against the dense oracle, under routings that nobody would wish for, with NaN in every fresh buffer.

Each program is compiled once for a (transport, devices, shape); hypothesis draws the numbers that go through it.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, PartitionSpec

from moejax.config import Granularity, Overflow
from moejax.moe import collectives
from moejax.moe.all_gather import AllGather
from moejax.moe.all_to_all import AllToAll
from moejax.moe.exchange import through_experts
from moejax.moe.hierarchical import Hierarchical
from moejax.moe.layer import ExpertWeights, expert_mlps
from moejax.moe.local import Local
from moejax.moe.rowwise import Rowwise
from tests.moe import oracle

T, D, F = 6, 5, 3  # tokens of a device, width, hidden width
SHAPES = {1: (8, 2), 2: (6, 3), 4: (8, 1), 8: (16, 2)}  # devices: experts, experts per token
CAPACITY = 1.25
DROP = Overflow.drop

TRANSPORTS = {
    "local": (1, lambda: Local()),
    "rowwise": (8, lambda: Rowwise("ep", 8, CAPACITY)),
    "rowwise, 2 devices": (2, lambda: Rowwise("ep", 2, CAPACITY)),
    "rowwise, 4 devices": (4, lambda: Rowwise("ep", 4, CAPACITY)),
    "rowwise, room for all": (4, lambda: Rowwise("ep", 4)),
    "rowwise, one transfer a peer": (4, lambda: Rowwise("ep", 4, CAPACITY, granularity=Granularity.peer)),
    "rowwise, drop": (8, lambda: Rowwise("ep", 8, CAPACITY, DROP)),
    "all_to_all": (8, lambda: AllToAll("ep", 8, CAPACITY)),
    "all_to_all, room for all": (2, lambda: AllToAll("ep", 2)),
    "all_gather": (8, lambda: AllGather("ep", 8, CAPACITY)),
    "all_gather, drop": (4, lambda: AllGather("ep", 4, CAPACITY, DROP)),
    "hierarchical, 2 nodes of 4": (8, lambda: Hierarchical("ep", 8, 4, CAPACITY)),
    "hierarchical, 4 nodes of 2, drop": (8, lambda: Hierarchical("ep", 8, 2, CAPACITY, DROP)),
}


def poisoned_rows(shape, dtype):
    return jnp.full(shape, jnp.nan if jnp.issubdtype(dtype, jnp.floating) else 77, dtype)


@pytest.fixture(autouse=True, scope="module")
def poison():
    """A buffer is full of NaN when it is new: what reads a row that nobody sent turns the result into NaN."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "fresh_rows", poisoned_rows)
        yield


@functools.cache
def program(name: str) -> Any:
    devices, make = TRANSPORTS[name]
    n_experts, _ = SHAPES[devices]
    mesh = Mesh(np.array(jax.devices()[:devices]), ("ep",), axis_types=(AxisType.Auto,))
    by_device, transport = PartitionSpec("ep"), make()

    def region(x, ids, weights, params, grad):
        def loss(x, weights, params):
            y, traffic = through_experts(transport, expert_mlps, params, x, ids, weights, n_experts)
            return jnp.sum(y * grad), (y, traffic)

        gradients, (y, traffic) = jax.grad(loss, (0, 1, 2), has_aux=True)(x, weights, params)
        return y, gradients, jax.tree.map(lambda t: t[None], traffic)

    return jax.jit(
        jax.shard_map(region, mesh=mesh, in_specs=(by_device,) * 5, out_specs=(by_device,) * 3, check_vma=False)
    )


ROUTINGS = ("balanced", "zipf", "one expert", "one device", "nothing", "half padding", "last padding")


def draw_ids(rng: np.random.Generator, routing: str, devices: int) -> np.ndarray:
    """int32[devices * T, K]; K different experts a token, E where it goes nowhere."""
    (n_experts, top_k), tokens = SHAPES[devices], devices * T
    if routing == "balanced":
        return np.stack([rng.permutation(n_experts)[:top_k] for _ in range(tokens)]).astype(np.int32)
    if routing == "one expert":  # and the same others behind it
        ids = np.tile(rng.permutation(n_experts)[:top_k], (tokens, 1))
    elif routing == "one device":
        per_device, device = n_experts // devices, rng.integers(devices)
        own = device * per_device + np.arange(per_device)
        ids = np.full((tokens, top_k), n_experts)
        for t in range(tokens):
            chosen = rng.permutation(own)[:top_k]
            ids[t, : len(chosen)] = chosen
    else:
        p = 1 / np.arange(1, n_experts + 1) ** 1.5
        ids = np.stack([rng.choice(n_experts, top_k, replace=False, p=p / p.sum()) for _ in range(tokens)])
    if routing == "nothing":
        ids[:] = n_experts
    elif routing == "half padding":
        ids[rng.random(tokens) < 0.5] = n_experts
    elif routing == "last padding":
        ids[tokens // 3 :] = n_experts
    return ids.astype(np.int32)


def draw_case(seed: int, routing: str, devices: int) -> oracle.Case:
    rng = np.random.default_rng(seed)
    (n_experts, top_k), tokens = SHAPES[devices], devices * T
    ids = draw_ids(rng, routing, devices)
    normal = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    x, weights = normal(tokens, D), normal(tokens, top_k)
    x[np.all(ids == n_experts, axis=1)] = np.nan  # padding may hold anything
    return oracle.Case(
        x, ids, weights, normal(n_experts, D, 2 * F), normal(n_experts, F, D), normal(tokens, D), ids < n_experts
    )


def buffer_rows(name: str) -> int:
    devices, make = TRANSPORTS[name]
    n_experts, top_k = SHAPES[devices]
    return make().buffer_rows(T, top_k, n_experts)


def run(name: str, case: oracle.Case) -> tuple[oracle.Answer, Any]:
    y, (dx, dweights, dparams), traffic = program(name)(
        case.x, case.ids, case.weights, ExpertWeights(case.w_up_gate, case.w_down), case.grad
    )
    return oracle.Answer(*map(np.asarray, (y, dx, dweights, *dparams))), jax.tree.map(np.asarray, traffic)


@pytest.mark.parametrize("name", TRANSPORTS)
@settings(max_examples=14)
@given(seed=st.integers(0, 2**32 - 1), routing=st.sampled_from(ROUTINGS))
def test_equals_the_dense_oracle(name: str, seed: int, routing: str):
    """Forward, and gradients of rows, weights and expert weights; under `drop`, of the rows that Olmo-core keeps."""
    devices = TRANSPORTS[name][0]
    case = draw_case(seed, routing, devices)
    dropping = name.endswith("drop")
    if dropping:
        rows = oracle.rowwise_rows(case.ids, SHAPES[devices][0], devices, buffer_rows(name))
        case = case._replace(kept=rows.row >= 0)
    answer, traffic = run(name, case)
    for field, ours, theirs in zip(oracle.Answer._fields, answer, oracle.dense(case), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5 * max(1.0, np.abs(theirs).max()), err_msg=field)
    lost = np.sum(case.ids < SHAPES[devices][0]) - np.sum(case.kept)
    assert traffic.dropped.sum() == lost
    assert np.all(traffic.rounds == traffic.rounds[0])


@pytest.mark.parametrize("name", ["rowwise", "all_to_all", "all_gather", "hierarchical, 2 nodes of 4"])
def test_every_token_to_one_expert(name: str):
    """Buffers as configured, the overflow told, and nothing lost (the result is compared above)."""
    devices, top_k = 8, SHAPES[8][1]
    case = draw_case(3, "one expert", devices)
    case = case._replace(ids=np.tile(np.array([[4, 5]], np.int32), (devices * T, 1)))  # both on device 2
    answer, traffic = run(name, case)
    np.testing.assert_allclose(answer.y, oracle.dense(case).y, rtol=1e-5, atol=1e-5)
    arriving = devices * T * top_k
    buffer = buffer_rows(name)
    assert CAPACITY * T * top_k <= buffer < CAPACITY * T * top_k + devices
    assert traffic.occupancy[0] == pytest.approx(arriving / buffer)
    assert traffic.rounds[0] == -(-arriving // buffer)
    assert traffic.overflow.sum() == arriving - buffer
    assert traffic.dropped.sum() == 0


@pytest.mark.parametrize("overflow", Overflow)
@settings(max_examples=6)
@given(seed=st.integers(0, 2**32 - 1), routing=st.sampled_from(ROUTINGS))
def test_rowwise_layout_row_for_row(overflow: Overflow, seed: int, routing: str):
    """What stands in the buffers of round 0 is Olmo-core's formula: expert, then source, then route order; then the
    tail."""
    devices, (n_experts, top_k) = 8, SHAPES[8]
    ids = draw_ids(np.random.default_rng(seed), routing, devices)
    transport = Rowwise("ep", devices, CAPACITY, overflow)
    buffer = transport.buffer_rows(T, top_k, n_experts)
    tokens = np.arange(devices * T, dtype=np.float32)[:, None]
    rows, sizes = arrivals(overflow)(tokens, ids)
    where = oracle.rowwise_rows(ids, n_experts, devices, buffer)
    expected = np.full((devices, buffer), np.nan)
    expected[where.device[where.row >= 0], where.row[where.row >= 0]] = np.nonzero(where.row >= 0)[0]
    there = np.isfinite(expected)
    np.testing.assert_array_equal(np.asarray(rows).reshape(devices, buffer)[there], expected[there])
    owned = np.bincount(ids[where.row >= 0], minlength=n_experts).reshape(devices, -1)
    np.testing.assert_array_equal(np.asarray(sizes).reshape(devices, -1), owned)


@functools.cache
def arrivals(overflow: Overflow) -> Any:
    devices, (n_experts, _) = 8, SHAPES[8]
    mesh = Mesh(np.array(jax.devices()[:devices]), ("ep",), axis_types=(AxisType.Auto,))
    transport = Rowwise("ep", devices, CAPACITY, overflow)

    def region(x, ids):
        return tuple(transport.dispatch(x, transport.plan(ids, n_experts), 0))

    spec = PartitionSpec("ep")
    return jax.jit(jax.shard_map(region, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))


def test_a_pytree_travels_as_one():
    """Data and their scales, of different widths and types, arrive side by side."""
    devices, (n_experts, top_k) = 8, SHAPES[8]
    ids = draw_ids(np.random.default_rng(5), "balanced", devices)
    mesh = Mesh(np.array(jax.devices()[:devices]), ("ep",), axis_types=(AxisType.Auto,))
    transport = Rowwise("ep", devices)
    spec = PartitionSpec("ep")

    def region(rows, ids):
        arrived = transport.dispatch(rows, transport.plan(ids, n_experts), 0)
        return arrived.rows, jnp.sum(arrived.group_sizes)[None]

    token = np.arange(devices * T)
    rows = {"data": np.repeat(token[:, None], 3, 1).astype(jnp.bfloat16), "scale": token.astype(np.uint8)}
    arrived, counts = jax.jit(jax.shard_map(region, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))(
        rows, ids
    )
    size = transport.buffer_rows(T, top_k, n_experts)
    for device, count in enumerate(np.asarray(counts)):
        scale = np.asarray(arrived["scale"]).reshape(devices, size)[device, :count]
        data = np.asarray(arrived["data"], np.float32).reshape(devices, size, 3)[device, :count]
        np.testing.assert_array_equal(data, np.repeat(scale[:, None], 3, 1))


def test_exactness_costs_no_memory():
    """Temp memory of the compiled forward and backward of two layers: `exact` at most 1.15 times `drop`."""
    exact, drop = (temporary_bytes(Rowwise("ep", 8, CAPACITY, overflow), layers=2) for overflow in Overflow)
    assert exact <= 1.15 * drop


def one_matrix(params: ExpertWeights, rows, group_sizes):
    """Experts in shape and memory, quick to compile: every row through the first one."""
    up, gate = jnp.split(rows @ params.w_up_gate[0], 2, axis=-1)
    return (up * jax.nn.silu(gate)) @ params.w_down[0]


def temporary_bytes(transport: Rowwise, layers: int, tokens: int = 512, width: int = 128, hidden: int = 128) -> int:
    n_experts, top_k = 32, 4
    mesh = Mesh(np.array(jax.devices()[:8]), ("ep",), axis_types=(AxisType.Auto,))

    def region(x, ids, weights, params):
        def loss(x, weights, params):
            for layer in range(layers):
                here = jax.tree.map(lambda p, n=layer: p[n], params)
                x, _ = through_experts(transport, one_matrix, here, x, ids, weights, n_experts)
            return jnp.sum(x)

        return jax.grad(loss, (0, 1, 2))(x, weights, params)

    by_device, by_expert = PartitionSpec("ep"), ExpertWeights(*[PartitionSpec(None, "ep")] * 2)
    specs = (by_device, by_device, by_device, by_expert)
    fn = jax.shard_map(region, mesh=mesh, in_specs=specs, out_specs=(by_device, by_device, by_expert), check_vma=False)
    shape = lambda *s, dtype=jnp.float32: jax.ShapeDtypeStruct(s, dtype)  # noqa: E731
    all_tokens = 8 * tokens
    params = ExpertWeights(shape(layers, n_experts, width, 2 * hidden), shape(layers, n_experts, hidden, width))
    lowered = jax.jit(fn).lower(
        shape(all_tokens, width), shape(all_tokens, top_k, dtype=jnp.int32), shape(all_tokens, top_k), params
    )
    return lowered.compile().memory_analysis().temp_size_in_bytes
