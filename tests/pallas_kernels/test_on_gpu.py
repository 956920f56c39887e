"""The kernels on a real GPU of the kinds they are written for: what no other rung shows. Skipped elsewhere.

JAX_PLATFORMS=cuda .venv/bin/python -m pytest -m gpu tests/pallas_kernels
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import (
    grouped_gemm,
    grouped_gemm_reference,
    grouped_gemm_weight_grad,
    grouped_gemm_weight_grad_reference,
    grouped_swiglu,
    grouped_swiglu_reference,
    top_k,
    top_k_reference,
)

D, F, E = 256, 384, 5
SIZES = {
    "empty, one row, all the rest": [0, 1, 0, 1023, 0],
    "nothing": [0] * E,
    "off the tiles, rows past the end": [37, 300, 5, 0, 130],
    "even": [200] * E,
}


def operands(sizes: list[int], rows: int):
    """NaN in the rows that no group owns."""
    rng = np.random.default_rng(0)
    lhs, grad, rhs = (rng.standard_normal(shape) for shape in ((rows, D), (rows, F), (E, D, F)))
    lhs[sum(sizes) :], grad[sum(sizes) :] = np.nan, np.nan
    return *(jnp.asarray(x, jnp.bfloat16) for x in (lhs, rhs, grad)), jnp.asarray(sizes, jnp.int32)


def assert_close(actual, expected, rounding: float = 2.0**-8) -> None:
    actual = np.asarray(actual, np.float64)
    np.testing.assert_allclose(actual, expected, rtol=rounding, atol=1e-3 * (1 + np.abs(expected).max(initial=0)))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1024, 1030], ids=["whole octets", "a rest"])
@pytest.mark.parametrize("sizes", SIZES)
def test_products_equal_reference(sizes, rows):
    sizes = SIZES[sizes]
    lhs, rhs, grad, group_sizes = operands(sizes, rows)
    run = lambda op, *x, **options: jax.jit(lambda *x: op(*x, implementation="mosaic", **options))(*x)  # noqa: E731
    out = run(grouped_gemm, lhs, rhs, group_sizes)
    assert_close(out, grouped_gemm_reference(lhs, rhs, sizes))
    assert not np.asarray(out, np.float32)[sum(sizes) :].any()
    back = run(grouped_gemm, grad, rhs, group_sizes, transpose_rhs=True)
    assert_close(back, grouped_gemm_reference(grad, rhs, sizes, transpose_rhs=True))
    weight = run(grouped_gemm_weight_grad, lhs, grad, group_sizes)
    assert_close(weight, grouped_gemm_weight_grad_reference(lhs, grad, sizes))
    hidden = run(grouped_swiglu, lhs, rhs, group_sizes)
    assert_close(hidden, grouped_swiglu_reference(lhs, rhs, sizes), rounding=2.0**-6)  # up and gate are rounded as well


@pytest.mark.gpu
@pytest.mark.parametrize(("tokens", "experts", "k"), [(1000, 64, 8), (4096, 128, 4), (64, 256, 1)])
def test_top_k_equals_reference(tokens, experts, k):
    logits = np.random.default_rng(0).standard_normal((tokens, experts)).astype(np.float32)
    actual, expected = top_k(jnp.asarray(logits), k, implementation="mosaic"), top_k_reference(logits, k)
    np.testing.assert_array_equal(actual.ids, expected.ids)
    np.testing.assert_array_equal(actual.counts, expected.counts)
    np.testing.assert_allclose(actual.values, expected.values, rtol=1e-6)
    np.testing.assert_allclose(actual.lse, expected.lse, rtol=1e-5)
