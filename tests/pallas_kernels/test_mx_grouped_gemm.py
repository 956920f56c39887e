"""Grouped GEMM on MXFP8 operands equals the float32 product of what they stand for, whoever computes it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.grouped_gemm import grouped_gemm_reference
from pallas_kernels.mx_grouped_gemm import _emulated, mx_grouped_gemm, mx_matmul
from pallas_kernels.mxfp8 import MXArray, dequantize, quantize

R, K, N, E = 48, 64, 40, 5


@functools.partial(jax.jit, static_argnames=("dtype",))
def multiplied(lhs: MXArray, rhs: MXArray, sizes: jax.Array, dtype: str = "float32") -> jax.Array:
    return mx_grouped_gemm(lhs, rhs, sizes, dtype=dtype)


@jax.jit
def in_mx(x: jax.Array) -> MXArray:
    return quantize(x)


def operands(seed: int) -> tuple[MXArray, MXArray]:
    rng = np.random.default_rng(seed)
    spread = lambda *shape: (rng.standard_normal(shape) * 2.0 ** rng.integers(-6, 7, shape)).astype(np.float32)  # noqa: E731
    return in_mx(spread(R, K)), in_mx(spread(E, N, K))


def expected(lhs: MXArray, rhs: MXArray, sizes: np.ndarray) -> np.ndarray:
    return grouped_gemm_reference(dequantize(lhs), dequantize(rhs), sizes, transpose_rhs=True)


@settings(max_examples=25, deadline=None)
@given(cuts=st.lists(st.integers(0, R), min_size=E, max_size=E), seed=st.integers(0, 5))
def test_any_group_sizes(cuts, seed):
    ends = np.sort(np.array(cuts))
    sizes = np.diff(ends, prepend=0).astype(np.int32)
    lhs, rhs = operands(seed)
    last = int(ends[-1])
    past_end = jnp.arange(R)[:, None] >= last  # NaN in scales and in data: never read
    lhs = MXArray(
        jnp.where(past_end, jnp.nan, lhs.data.astype(jnp.float32)).astype(lhs.data.dtype),
        jnp.where(past_end, 255, lhs.scales).astype(jnp.uint8),
    )
    out = np.asarray(multiplied(lhs, rhs, sizes))
    reference = expected(MXArray(lhs.data[:last], lhs.scales[:last]), rhs, sizes)
    magnitude = np.abs(reference).max(initial=1.0)
    np.testing.assert_allclose(out[:last], reference, rtol=1e-5, atol=2e-6 * magnitude)
    np.testing.assert_array_equal(out[last:], 0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_both_emulations_are_one_product(dtype):
    """The tiles of the CPU road, and whole operands dequantised, which is what a GPU without MXFP8 does."""
    lhs, rhs = operands(0)
    sizes = np.array([7, 0, 16, 1, 20], np.int32)
    tiles = np.asarray(multiplied(lhs, rhs, sizes, dtype=dtype), np.float32)
    whole = np.asarray(jax.jit(functools.partial(_emulated, dtype=jnp.dtype(dtype)))(lhs, rhs, sizes), np.float32)
    error = 1e-5 if dtype == "float32" else 2.0**-7
    np.testing.assert_allclose(tiles, whole, rtol=error, atol=error)
    np.testing.assert_allclose(tiles[:44], expected(lhs, rhs, sizes)[:44], rtol=error, atol=error * np.abs(whole).max())


def test_one_group_is_a_matrix_product():
    lhs, rhs = operands(2)
    one = jax.tree.map(lambda x: x[0], rhs)
    out = jax.jit(lambda a, b: mx_matmul(a, b, dtype=jnp.float32))(lhs, one)
    exact = np.asarray(dequantize(lhs), np.float64) @ np.asarray(dequantize(one), np.float64).T
    np.testing.assert_allclose(out, exact, rtol=1e-5, atol=2e-6 * np.abs(exact).max())
    with pytest.raises(ValueError, match=r"lhs \[R, K\] and rhs \[N, K\]"):
        mx_matmul(lhs, rhs, dtype=jnp.float32)


def test_bfloat16_holds_the_operands_exactly():
    lhs, _ = operands(1)
    np.testing.assert_array_equal(np.asarray(dequantize(lhs, jnp.bfloat16), np.float32), dequantize(lhs))


def test_operands_that_do_not_fit_are_told():
    lhs, rhs = operands(0)
    sizes = jnp.zeros(E, jnp.int32)
    with pytest.raises(ValueError, match=r"lhs \[R, K\], rhs \[E, N, K\].*axis -2"):
        mx_grouped_gemm(lhs, rhs.transposed(), sizes, dtype=jnp.float32)
    with pytest.raises(ValueError, match="'auto', 'emulated', 'mosaic'"):
        mx_grouped_gemm(lhs, rhs, sizes, dtype=jnp.float32, implementation="triton")
    with pytest.raises(ValueError, match="'auto'"):
        mx_grouped_gemm(lhs, rhs, sizes, dtype=jnp.float32, implementation="mosaic")
