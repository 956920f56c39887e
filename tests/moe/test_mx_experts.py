"""Experts in MXFP8 against an oracle written from the recipe in numpy, over every transport, with NaN in fresh buffers.

The oracle rounds by the whole-number rule and multiplies in float64, route by route; it knows no buffers and no rounds.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec

from moejax.models.quantised import MXRecipe, QuantisedWeight, quantise_weight
from moejax.moe import collectives
from moejax.moe.all_gather import AllGather
from moejax.moe.all_to_all import AllToAll
from moejax.moe.exchange import through_experts
from moejax.moe.hierarchical import Hierarchical
from moejax.moe.layer import ExpertWeights, expert_mlps
from moejax.moe.local import Local
from moejax.moe.mx_experts import QuantisedExperts
from moejax.moe.rowwise import Rowwise
from tests.moe import oracle
from tests.pallas_kernels.integer_rule import rounded

T, D, F, E, K = 8, 64, 32, 8, 2  # tokens of a device, width, hidden width, experts, experts of a token

TRANSPORTS = {
    "local": (1, lambda: Local()),
    "rowwise": (4, lambda: Rowwise("ep", 4)),
    "rowwise in rounds": (4, lambda: Rowwise("ep", 4, 0.5)),
    "all_to_all": (4, lambda: AllToAll("ep", 4)),
    "all_gather": (4, lambda: AllGather("ep", 4)),
    "hierarchical": (4, lambda: Hierarchical("ep", 4, 2)),
}


@pytest.fixture(autouse=True, scope="module")
def poison():
    with pytest.MonkeyPatch.context() as patch:
        fresh = lambda shape, dtype: jnp.full(shape, 0x7F if dtype == jnp.uint8 else jnp.nan, dtype)  # noqa: E731
        patch.setattr(collectives, "fresh_rows", fresh)
        yield


class Case(NamedTuple):
    x: np.ndarray
    ids: np.ndarray
    weights: np.ndarray
    w_up_gate: np.ndarray
    w_down: np.ndarray
    grad: np.ndarray


def draw(devices: int, seed: int = 0) -> Case:
    rng = np.random.default_rng(seed)
    tokens = devices * T
    ids = np.stack([rng.choice(E, K, replace=False, p=[0.4, *[0.6 / 7] * 7]) for _ in range(tokens)]).astype(np.int32)
    ids[3] = E  # routed nowhere
    normal = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    weights = rng.random((tokens, K)).astype(np.float32)
    return Case(normal(tokens, D), ids, weights, normal(E, D, 2 * F), normal(E, F, D), normal(tokens, D))


def swiglu(up_gate: np.ndarray) -> np.ndarray:
    up, gate = np.split(up_gate, 2)
    return up * gate / (1 + np.exp(-gate))


def swiglu_gradient(up_gate: np.ndarray, dh: np.ndarray) -> np.ndarray:
    up, gate = np.split(up_gate, 2)
    sigmoid = 1 / (1 + np.exp(-gate))
    return np.concatenate([dh * gate * sigmoid, dh * up * sigmoid * (1 + gate * (1 - sigmoid))])


def from_the_recipe(case: Case, keep_hidden: bool, devices_of_sums: int = 0) -> oracle.Answer:
    """devices_of_sums: of `all_gather`, where each device's sum of a token's rows is quantised, not each row."""
    up_forward, up_backward = rounded(case.w_up_gate, 1), rounded(case.w_up_gate, 2)
    down_forward, down_backward = rounded(case.w_down, 1), rounded(case.w_down, 2)
    y, dx, d_weights = np.zeros(case.x.shape), np.zeros(case.x.shape), np.zeros(case.weights.shape)
    d_up, d_down = np.zeros(case.w_up_gate.shape), np.zeros(case.w_down.shape)
    x_q = rounded(case.x)
    for t in range(len(case.x)):
        dy = rounded(case.grad[t]) if devices_of_sums else case.grad[t]
        sums = np.zeros((2, max(devices_of_sums, 1), D))
        for k in range(K):
            e, weight = case.ids[t, k], float(case.weights[t, k])
            if e == E:
                continue
            up_gate = x_q[t] @ up_forward[e]
            out = rounded(swiglu(up_gate)) @ down_forward[e]
            g = rounded(weight * dy)
            up_gate = rounded(up_gate) if keep_hidden else up_gate
            d_up_gate = swiglu_gradient(up_gate, g @ down_backward[e].T)
            dx_row = rounded(d_up_gate) @ up_backward[e].T
            d_up[e] += np.outer(x_q[t], d_up_gate)
            d_down[e] += np.outer(swiglu(up_gate), g)
            d_weights[t, k] = rounded(out) @ dy
            if devices_of_sums:
                sums[:, e // (E // devices_of_sums)] += np.stack([weight * out, dx_row])
            else:
                sums[:, 0] += np.stack([weight * rounded(out), rounded(dx_row)])
        y[t], dx[t] = (rounded(sums) if devices_of_sums else sums).sum(1)
    return oracle.Answer(y, dx, d_weights, d_up, d_down)


@functools.cache
def program(name: str, keep_hidden: bool = True) -> Any:
    devices, make = TRANSPORTS[name]
    mesh = Mesh(np.array(jax.devices()[:devices]), ("ep",), axis_types=(AxisType.Auto,))
    recipe, spec = MXRecipe(keep_hidden=keep_hidden), PartitionSpec("ep")

    def region(x, ids, weights, params, grad):
        copies = QuantisedExperts(*(quantise_weight(w, 1, 1, None, "rceil") for w in params))

        def loss(x, weights, params):
            y, traffic = through_experts(make(), recipe, params, x, ids, weights, E, copies)
            return jnp.sum(y * grad), (y, traffic.rounds[None])

        anchors = jax.tree.map(lambda w: jnp.full(w.shape, jnp.nan), params)  # their values are not read
        gradients, (y, rounds) = jax.grad(loss, (0, 1, 2), has_aux=True)(x, weights, anchors)
        return y, gradients, rounds

    mapped = jax.shard_map(region, mesh=mesh, in_specs=(spec,) * 5, out_specs=(spec,) * 3, check_vma=False)
    return jax.jit(mapped)


def run(name: str, case: Case, keep_hidden: bool = True) -> tuple[oracle.Answer, np.ndarray]:
    params = ExpertWeights(case.w_up_gate, case.w_down)
    y, (dx, d_weights, d_params), rounds = program(name, keep_hidden)(case.x, case.ids, case.weights, params, case.grad)
    return oracle.Answer(*map(np.asarray, (y, dx, d_weights, *d_params))), np.asarray(rounds)


@pytest.mark.parametrize("name", TRANSPORTS)
def test_equals_the_recipe(name):
    devices = TRANSPORTS[name][0]
    case = draw(devices)
    answer, rounds = run(name, case)
    expected = from_the_recipe(case, True, devices if name == "all_gather" else 0)
    for field, ours, theirs in zip(oracle.Answer._fields, answer, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5 * np.abs(theirs).max(), err_msg=field)
    assert (rounds > 1).all() == (name == "rowwise in rounds")


def test_the_hidden_rows_may_wait_unquantised():
    case = draw(1, seed=1)
    answer, _ = run("local", case, keep_hidden=False)
    for field, ours, theirs in zip(oracle.Answer._fields, answer, from_the_recipe(case, False), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5 * np.abs(theirs).max(), err_msg=field)


def test_it_is_near_what_it_stands_for():
    """Straight-through: the gradients are those of the plain experts, to a few percent of their size."""
    case = draw(1, seed=2)
    answer, _ = run("local", case)
    here = case.ids < E
    plain = oracle.dense(oracle.Case(*case, here))
    for ours, theirs in zip(answer, plain, strict=True):
        assert np.linalg.norm(ours - theirs) < 0.1 * np.linalg.norm(theirs)
        assert np.linalg.norm(ours - theirs) > 1e-3 * np.linalg.norm(theirs), "nothing was quantised"


def exchanged_bytes(name: str, recipe: MXRecipe | None, dtype: Any) -> int:
    """Bytes of the operands of every exchange of rows in forward and backward, from the jaxpr."""
    devices, make = TRANSPORTS[name]
    mesh = Mesh(np.array(jax.devices()[:devices]), ("ep",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec("ep")

    def region(x, ids, weights, params):
        copies = QuantisedExperts(*(quantise_weight(w, 1, 1, None, "rceil") for w in params))
        inside = jax.tree.map(lambda w: w.astype(dtype), params)

        def loss(x, weights, params):
            experts, beside = (recipe, copies) if recipe else (expert_mlps, None)
            y, _ = through_experts(make(), experts, params, x, ids, weights, E, beside)
            return jnp.sum(y.astype(jnp.float32))

        return jax.grad(loss, (0, 1, 2))(x.astype(dtype), weights, inside)

    mapped = jax.shard_map(region, mesh=mesh, in_specs=(spec,) * 4, out_specs=spec, check_vma=False)
    case = draw(devices)
    closed = jax.make_jaxpr(mapped)(case.x, case.ids, case.weights, ExpertWeights(case.w_up_gate, case.w_down))
    return sum(_moved(closed.jaxpr))


def _moved(jaxpr: Any) -> Any:
    for equation in jaxpr.eqns:
        if equation.primitive.name in ("ragged_all_to_all", "all_to_all"):
            aval = equation.invars[0].aval
            if aval.ndim > 1 and aval.shape[-1] > 1:  # rows; counts are another matter
                yield aval.size * aval.dtype.itemsize
        for value in equation.params.values():
            for inner in value if isinstance(value, (tuple, list)) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from _moved(inner)


@pytest.mark.parametrize("name", ["rowwise", "all_to_all", "hierarchical"])
def test_the_wire_carries_at_most_0_53_of_bfloat16(name):
    plain, mx = (exchanged_bytes(name, recipe, jnp.bfloat16) for recipe in (None, MXRecipe()))
    assert plain > 0 and mx == plain * (1 + 1 / 32) / 2
    assert mx <= 0.53 * plain


def test_a_quantised_weight_keeps_its_shape_as_layers_come_and_go():
    w = jnp.ones((3, 2, 64, 4, 16))
    stacked = jax.jit(lambda w: quantise_weight(w, 2, 1, None, "rceil"))(w)
    assert isinstance(stacked, QuantisedWeight) and stacked.shape == w.shape
    one = jax.tree.map(lambda x: x[0, 0], stacked)
    assert one.shape == (64, 4, 16)
    assert one.forward.shape == (64, 64) and one.forward.scales.shape == (64, 2)
