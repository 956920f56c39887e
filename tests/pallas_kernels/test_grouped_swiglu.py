"""SwiGLU over groups and the expert MLP: equal to the reference and to the plain composition, gradients included."""

import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import (
    grouped_gemm,
    grouped_gemm_library,
    grouped_mlp,
    grouped_swiglu,
    grouped_swiglu_reference,
    resolve_implementation,
)
from pallas_kernels.grouped_gemm import swiglu_rows

R, D, F, E = 40, 8, 6, 3


def operands(seed: int, sizes: list[int], dtype=jnp.float32):
    """lhs with NaN past the end, [E, D, 2F], [E, F, D], sizes."""
    rng = np.random.default_rng(seed)
    lhs, up_gate, down = (rng.standard_normal(shape) for shape in ((R, D), (E, D, 2 * F), (E, F, D)))
    lhs[sum(sizes) :] = np.nan
    return *(jnp.asarray(x, dtype) for x in (lhs, up_gate, down)), jnp.asarray(sizes, jnp.int32)


@settings(max_examples=5, deadline=None, derandomize=True)
@given(cuts=st.lists(st.integers(0, R), min_size=E, max_size=E), seed=st.integers(0, 1000))
def test_equals_reference_for_any_sizes(cuts, seed):
    sizes = np.diff([0, *sorted(cuts)]).tolist()
    lhs, up_gate, _, group_sizes = operands(seed, sizes)
    out = SWIGLU(lhs, up_gate, group_sizes)
    np.testing.assert_allclose(out, grouped_swiglu_reference(lhs, up_gate, sizes), rtol=1e-4, atol=1e-5)
    assert not np.asarray(out)[sum(sizes) :].any()


SWIGLU = jax.jit(grouped_swiglu)


@pytest.mark.parametrize("implementation", ["auto", "xla"])
def test_gradients_of_the_mlp_are_those_of_its_parts(implementation):
    lhs, up_gate, down, sizes = operands(0, [7, 0, 20])

    def loss(product):
        return lambda *weights: jnp.sum(jnp.sin(product(*weights)))

    def whole(lhs, up_gate, down):
        return grouped_mlp(lhs, up_gate, down, sizes, implementation=implementation)

    def parts(lhs, up_gate, down):
        return grouped_gemm(grouped_swiglu(lhs, up_gate, sizes), down, sizes)

    def plain(lhs, up_gate, down):
        return grouped_gemm(swiglu_rows(grouped_gemm(lhs, up_gate, sizes)), down, sizes)

    ours, other, expected = (jax.jit(jax.grad(loss(f), (0, 1, 2)))(lhs, up_gate, down) for f in (whole, parts, plain))
    for a, b, c in zip(ours, other, expected, strict=True):
        np.testing.assert_allclose(a, c, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(b, c, rtol=1e-5, atol=1e-5)


def test_the_backward_keeps_up_and_gate_but_not_the_hidden_rows():
    """2F values a row, under their name; the hidden rows follow from them to the bit, in bfloat16 too."""
    lhs, up_gate, down, sizes = operands(1, [9, 0, 31], jnp.bfloat16)

    def mlp(lhs, up_gate, down):
        return grouped_mlp(lhs, up_gate, down, sizes, save_as="hidden")

    shapes = sorted(x.shape for x in jax.tree.leaves(jax.vjp(mlp, lhs, up_gate, down)[1]) if x.dtype == jnp.bfloat16)
    assert shapes == sorted([(R, D), (E, D, 2 * F), (E, F, D), (R, 2 * F)])
    jaxpr = str(jax.make_jaxpr(lambda *x: jax.vjp(mlp, *x)[1])(lhs, up_gate, down))
    assert "name=hidden" in jaxpr
    products = grouped_gemm(lhs, up_gate, sizes)
    np.testing.assert_array_equal(grouped_swiglu(lhs, up_gate, sizes), swiglu_rows(products))


def test_bad_input_is_one_sentence_with_shapes():
    lhs, up_gate, down, sizes = operands(0, [1, 1, 1])
    with pytest.raises(ValueError, match=r"up_gate \[E, D, 2F\], got up_gate float32\[3, 8, 11\]"):
        grouped_swiglu(lhs, up_gate[..., :-1], sizes)
    with pytest.raises(ValueError, match=r"grouped_swiglu.*float32\[1, 40, 8\]"):
        grouped_swiglu(lhs[None], up_gate, sizes)
    with pytest.raises(ValueError, match=r"down float32\[3, 5, 8\]"):
        grouped_mlp(lhs, up_gate, down[:, :-1], sizes)
    with pytest.raises(TypeError, match=r"one dtype.*down bfloat16"):
        grouped_mlp(lhs, up_gate, down.astype(jnp.bfloat16), sizes)


def test_debug_mode_looks_at_the_sizes(monkeypatch):
    lhs, up_gate, _, _ = operands(0, [1, 1, 1])
    overlong, negative = jnp.asarray([30, 0, 20], jnp.int32), jnp.asarray([30, -1, 2], jnp.int32)
    jax.block_until_ready(grouped_gemm(lhs, up_gate, overlong))
    monkeypatch.setenv("GROUPED_GEMM_DEBUG", "1")
    with pytest.raises(ValueError, match=r"at most the 40 rows of lhs, got \[30, 0, 20\] with sum 50"):
        grouped_gemm(lhs, up_gate, overlong)
    with pytest.raises(ValueError, match=r"got \[30, -1, 2\]"):
        grouped_swiglu(lhs, up_gate, negative)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"got \[30, 0, 20\] with sum 50"):
        jax.block_until_ready(jax.jit(lambda *x: grouped_gemm(*x))(lhs, up_gate, overlong))
        jax.effects_barrier()


def test_tokamax_is_asked_for_by_name_and_missed_with_the_way_out(monkeypatch):
    monkeypatch.setattr(grouped_gemm_library.importlib.util, "find_spec", lambda name: None)
    for call in (
        lambda: resolve_implementation("tokamax"),
        lambda: grouped_swiglu(*operands(0, [1, 1, 1])[:2], jnp.ones(3, jnp.int32), implementation="tokamax"),
    ):
        with pytest.raises(ValueError, match="tokamax, which is not installed: pip install tokamax, or use 'auto'"):
            call()


def test_tokamax_is_called_as_its_ragged_dot_is_documented(monkeypatch):
    """Its `ragged_dot(lhs, rhs, group_sizes)` stands for all three products, rows past the end kept out of it."""
    stand_in = SimpleNamespace(ragged_dot=lambda lhs, rhs, group_sizes: jax.lax.ragged_dot(lhs, rhs, group_sizes))
    monkeypatch.setattr(grouped_gemm_library, "require_tokamax", lambda: stand_in)
    monkeypatch.setattr(sys.modules["pallas_kernels.grouped_gemm"], "require_tokamax", lambda: stand_in)
    lhs, up_gate, down, sizes = operands(0, [7, 0, 20])

    def gradients(implementation):
        loss = lambda *x: jnp.sum(jnp.sin(grouped_mlp(*x, sizes, implementation=implementation)))  # noqa: E731
        return jax.grad(loss, (0, 1, 2))(lhs, up_gate, down)

    for a, b in zip(gradients("tokamax"), gradients("auto"), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
