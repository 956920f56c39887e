"""The parts of the model against plain formulas: norm, rotary positions, attention and its mask, SwiGLU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moejax.config import FULL_ATTENTION
from moejax.context import single_device_context
from moejax.models.attention import attention_mask, rotary
from moejax.models.mlp import swiglu
from moejax.models.norms import rms_norm
from moejax.models.transformer import parts
from tests.models.weights import fresh
from tests.small import small_config


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


# --- norm ----------------------------------------------------------------------------------------------------------


def test_rms_norm_is_its_formula():
    x, gain = normal(0, 3, 5, 16), normal(1, 16)
    expected = x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-3) * gain
    np.testing.assert_allclose(rms_norm(x, gain, 1e-3), expected, rtol=1e-6)


def test_rms_norm_forgets_the_length_of_its_input_and_computes_in_fp32():
    x, ones = normal(0, 4, 64), np.ones(64, np.float32)
    np.testing.assert_allclose(rms_norm(1000 * x, ones, 1e-12), rms_norm(x, ones, 1e-12), rtol=1e-5)
    # 300^2 * 64 overflows nothing, and the mean of squares keeps fp32 digits: the result is the rounded exact one
    low = jnp.asarray(300 * x, jnp.bfloat16)
    exact = rms_norm(np.asarray(low, np.float32), ones, 1e-6)
    np.testing.assert_array_equal(rms_norm(low, ones, 1e-6), exact.astype(jnp.bfloat16))


def test_swiglu_takes_up_first_and_gate_second():
    up, gate = normal(0, 2, 3), normal(1, 2, 3)
    np.testing.assert_allclose(
        swiglu(jnp.concatenate([up, gate], -1)), up * gate / (1 + np.exp(-gate)), rtol=1e-5, atol=1e-7
    )


# --- rotary positions ----------------------------------------------------------------------------------------------


@given(shift=st.integers(-50, 50), far=st.integers(0, 60))
def test_rotary_scores_depend_on_the_distance_alone(shift: int, far: int):
    q, k = normal(0, 1, 1, 1, 8), normal(1, 1, 1, 1, 8)

    def score(s: int, t: int) -> float:
        at = [jnp.full((1, 1), position) for position in (s, t)]
        return float(jnp.sum(rotary(q, at[0], 100.0) * rotary(k, at[1], 100.0)))

    assert score(100 + shift + far, 100 + shift) == pytest.approx(score(100 + far, 100), abs=1e-4)


def test_rotary_is_a_rotation_by_the_published_angles():
    x, position = normal(0, 2, 6, 3, 8), np.arange(12).reshape(2, 6)
    turned = np.asarray(rotary(x, position, 500.0))
    for i in range(4):  # coordinate i turns with coordinate i + H/2
        angle = position[..., None] * 500.0 ** (-2 * i / 8)
        pair = (x[..., i] + 1j * x[..., i + 4]) * np.exp(1j * angle)
        np.testing.assert_allclose(turned[..., i], pair.real, atol=2e-6)
        np.testing.assert_allclose(turned[..., i + 4], pair.imag, atol=2e-6)
    np.testing.assert_array_equal(rotary(x, np.zeros((2, 6), int), 500.0), x)


# --- mask and attention --------------------------------------------------------------------------------------------


@given(
    documents=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    window=st.sampled_from([FULL_ATTENTION, 1, 2, 3, 100]),
)
def test_the_mask_looks_back_within_document_and_window(documents: list[int], window: int):
    segments = np.repeat(np.arange(len(documents)), documents)
    mask = np.asarray(attention_mask(segments[None], jnp.asarray(window)))[0, 0]
    for s in range(len(segments)):
        for t in range(len(segments)):
            seen = t <= s and segments[s] == segments[t] and (window == FULL_ATTENTION or s - t < window)
            assert mask[s, t] == seen, (s, t)


ATTENTIONS = [
    (),
    ("model.attention.n_heads=4", "model.attention.n_kv_heads=2", "model.attention.qk_norm=full"),
    ("model.attention.qk_norm=none", "model.attention.n_kv_heads=2"),
]


@pytest.mark.parametrize("overrides", ATTENTIONS, ids=["one-kv-head", "grouped-full-norm", "no-norm"])
def test_attention_is_the_naive_one(overrides):
    """One query at a time, over the keys it may see, in fp64."""
    c = small_config(*overrides, "model.init_std=0.3").model
    a = c.attention
    params = jax.tree.map(lambda p: p[0], fresh(c)["dense_blocks"]["attention"])
    if a.qk_norm != "none":  # gains that are not all one
        for name in ("q_norm", "k_norm"):
            params[name]["gain"] = jnp.asarray(1 + 0.3 * normal(3, *params[name]["gain"].shape))
    block = {**jax.tree.map(lambda p: p[0], fresh(c)["dense_blocks"]), "attention": params}
    x, window = normal(1, 2, 9, c.d_model), 3
    segments = np.array([[0] * 5 + [1] * 4, [0] * 9])
    positions = np.array([[*range(5), *range(4)], [*range(9)]])
    context = single_device_context(jnp.asarray(segments), jnp.asarray(positions))
    module = parts(c).dense_block(block).attention
    module.windowed = True
    ours = np.asarray(module(jnp.asarray(x), context, jnp.asarray(window)))

    p = jax.tree.map(lambda w: np.asarray(w).astype(np.float64), params)
    q, k, v = np.split(np.einsum("bsd,dqh->bsqh", x, p["w_qkv"]), [a.n_heads, a.n_heads + a.n_kv_heads], axis=2)

    def norm(y: np.ndarray, name: str) -> np.ndarray:
        if a.qk_norm == "none":
            return y
        flat = y.reshape(*y.shape[:2], -1) if a.qk_norm == "full" else y
        flat = flat / np.sqrt(np.mean(flat**2, -1, keepdims=True) + c.norm_eps) * p[name]["gain"]
        return flat.reshape(y.shape)

    q, k = (
        np.asarray(rotary(norm(y, n), positions, a.rope_theta)).astype(np.float64)
        for y, n in ((q, "q_norm"), (k, "k_norm"))
    )
    expected = np.zeros(x.shape)
    for b, s, n in np.ndindex(2, 9, a.n_heads):
        m = n * a.n_kv_heads // a.n_heads
        seen = [t for t in range(s + 1) if segments[b, t] == segments[b, s] and s - t < window]
        scores = np.array([q[b, s, n] @ k[b, t, m] for t in seen]) / np.sqrt(a.head_dim)
        weights = np.exp(scores - scores.max())
        weights /= weights.sum()
        expected[b, s] += sum(w * v[b, t, m] for w, t in zip(weights, seen, strict=True)) @ p["w_out"][n]
    np.testing.assert_allclose(ours, expected, rtol=2e-4, atol=2e-5)
