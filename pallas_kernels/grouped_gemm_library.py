"""The grouped GEMM by other people's kernels: "xla", `lax.ragged_dot_general`, and "tokamax", where it is installed.

Both take rows past the last group for what they are by select, at either end: a library may multiply them, or leave
what it finds. tokamax (Google's library of Pallas kernels, github.com/openxla/tokamax) is no requirement of ours: it is
there to compare with, and to fall back on should a kernel of ours turn out wrong on a GPU.
"""

import importlib.util
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax


def grouped_gemm_xla(lhs_RD: Array, rhs: Array, group_sizes_E: Array, *, transpose_rhs: bool) -> Array:
    dimensions = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((1,), (2 if transpose_rhs else 1,)), ((), ())),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=[0],
    )
    out_RF = lax.ragged_dot_general(
        lhs_RD, rhs, group_sizes_E, dimensions, preferred_element_type=jnp.dtype(jnp.float32)
    )
    return _zero_past_end(out_RF.astype(lhs_RD.dtype), group_sizes_E)


def grouped_gemm_weight_grad_xla(lhs_RD: Array, grad_RF: Array, group_sizes_E: Array) -> Array:
    dimensions = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
    )
    out_EDF = lax.ragged_dot_general(
        _zero_past_end(lhs_RD, group_sizes_E),
        _zero_past_end(grad_RF, group_sizes_E),
        group_sizes_E,
        dimensions,
        preferred_element_type=jnp.dtype(jnp.float32),
    )
    return out_EDF.astype(lhs_RD.dtype)


def grouped_gemm_tokamax(lhs_RD: Array, rhs: Array, group_sizes_E: Array, *, transpose_rhs: bool) -> Array:
    ragged_dot = require_tokamax().ragged_dot
    if transpose_rhs:  # the gradient of a product in its rows, so that tokamax reads the weights as it sees fit
        rows = jnp.zeros((lhs_RD.shape[0], rhs.shape[1]), lhs_RD.dtype)
        out_RF = jax.vjp(lambda x: ragged_dot(x, rhs, group_sizes_E), rows)[1](lhs_RD)[0]
    else:
        out_RF = ragged_dot(lhs_RD, rhs, group_sizes_E)
    return _zero_past_end(out_RF.astype(lhs_RD.dtype), group_sizes_E)


def grouped_gemm_weight_grad_tokamax(lhs_RD: Array, grad_RF: Array, group_sizes_E: Array) -> Array:
    ragged_dot = require_tokamax().ragged_dot
    lhs_RD, grad_RF = _zero_past_end(lhs_RD, group_sizes_E), _zero_past_end(grad_RF, group_sizes_E)
    weight = jnp.zeros((group_sizes_E.shape[0], lhs_RD.shape[1], grad_RF.shape[1]), lhs_RD.dtype)
    pull = jax.vjp(lambda w: ragged_dot(lhs_RD, w, group_sizes_E), weight)[1]
    return pull(grad_RF)[0].astype(lhs_RD.dtype)


def require_tokamax() -> Any:
    """The module tokamax. Raises ValueError with the way out where it is not installed."""
    if importlib.util.find_spec("tokamax") is None:
        raise ValueError(
            "Grouped GEMM implementation 'tokamax' needs the package tokamax, which is not installed: "
            "pip install tokamax, or use 'auto'."
        )
    return importlib.import_module("tokamax")


def _zero_past_end(rows_RD: Array, group_sizes_E: Array) -> Array:
    exists = lax.broadcasted_iota(jnp.int32, (rows_RD.shape[0], 1), 0) < jnp.sum(group_sizes_E)
    return jnp.where(exists, rows_RD, jnp.zeros((), rows_RD.dtype))
