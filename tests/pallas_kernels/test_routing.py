"""Top-k routing: every road equals the reference, gradients equal differences, and bad input is told."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import routing
from pallas_kernels.routing import top_k, top_k_reference
from pallas_kernels.routing_mosaic import top_k_mosaic

T, E, K = 72, 16, 4  # a block of 64 tokens and a rest


def logits(seed: int) -> np.ndarray:
    """Random rows, and hard ones: all equal, fewer finite ones than K, none finite, none positive, ties in halves."""
    x = np.random.default_rng(seed).standard_normal((T, E)).astype(np.float32)
    x[0], x[1], x[2] = 0.0, -np.inf, -np.abs(x[2])
    x[1, [9, 3]] = 1.0, -2.0
    x[3] = -np.inf
    x[65] = np.round(x[65])
    return x


@functools.cache
def interpreted():
    return jax.jit(functools.partial(top_k_mosaic, k=K, interpret=plgpu.InterpretGPUParams(detect_races=True)))


def by_kernel(x):
    *by_row, counts = interpreted()(x)
    return routing.TopK(*by_row, counts.sum(0))


roads = pytest.mark.parametrize("road", [by_kernel, lambda x: top_k(x, K)], ids=["kernel", "here"])


@roads
def test_equals_reference(road):
    @settings(max_examples=3, deadline=None, derandomize=True, database=None)
    @given(seed=st.integers(0, 2**31))
    def for_any_logits(seed):
        actual, expected = road(jnp.asarray(logits(seed))), top_k_reference(logits(seed), K)
        np.testing.assert_array_equal(actual.ids, expected.ids)
        np.testing.assert_array_equal(actual.counts, expected.counts)
        np.testing.assert_allclose(actual.values, expected.values, rtol=1e-7)
        np.testing.assert_allclose(actual.lse, expected.lse, rtol=1e-5, atol=1e-6)

    for_any_logits()


def test_gradient_is_that_of_the_plain_composition():
    """Weights exp(values - lse), as a softmax router takes them, and the z-loss of lse."""
    x = jnp.asarray(np.random.default_rng(0).standard_normal((T, E)), jnp.float32)
    mix = jnp.asarray(np.random.default_rng(1).standard_normal((T, K)), jnp.float32)

    def loss(x, values, lse):
        return jnp.sum(mix * jnp.exp(values - lse[:, None])) + jnp.sum(lse**2)

    def ours(x):
        out = top_k(x, K)
        return loss(x, out.values, out.lse)

    def plain(x):
        return loss(x, jax.lax.top_k(x, K)[0], jax.nn.logsumexp(x, axis=1))

    np.testing.assert_allclose(jax.grad(ours)(x), jax.grad(plain)(x), rtol=1e-4, atol=1e-6)


def test_auto_takes_the_kernel_where_there_is_one(monkeypatch):
    """Cross-lowered for CUDA: the kernel where a GPU of its kind is meant and the logits suit, else XLA's top-k."""

    def text(dtype, experts):
        traced = jax.jit(functools.partial(top_k, k=K)).trace(jax.ShapeDtypeStruct((T, experts), dtype))
        return traced.lower(lowering_platforms=("cuda",)).as_text()

    assert "routing_top_k" not in text(jnp.float32, E)
    monkeypatch.setattr(routing, "target", lambda: object())
    assert "routing_top_k" in text(jnp.float32, E)
    assert "routing_top_k" not in text(jnp.bfloat16, E)
    assert "routing_top_k" not in text(jnp.float32, 9)


def test_bad_input_is_told():
    x = jnp.zeros((3, 8))
    with pytest.raises(ValueError, match=r"got logits float32\[3, 8\] and k=9"):
        top_k(x, 9)
    with pytest.raises(TypeError, match=r"got logits int32\[3, 8\]"):
        top_k(x.astype(jnp.int32), 2)
    with pytest.raises(ValueError, match="no implementation 'loop': use one of 'auto', 'mosaic', 'xla'"):
        top_k(x, 2, implementation="loop")
    with pytest.raises(ValueError, match="needs an NVIDIA GPU"):
        top_k(x, 2, implementation="mosaic")
    with pytest.raises(ValueError, match="multiple of 8 experts up to 256.*got 2 of 9"):
        top_k(jnp.zeros((3, 9)), 2, implementation="mosaic")
