"""Grouped GEMM of MXFP8 operands: each row times the matrix of its own expert, both in 8 bits, sums in float32.

    lhs_RK, rhs_ENK (MXArray, blocks along K), group_sizes_E --implementation--> out_RN
        emulated   on CPU tiles of rows, each dequantised as it is read (grouped_gemm_cpu.py); elsewhere both operands
                   dequantised to `dtype`, which holds them exactly, and `grouped_gemm`
        mosaic     Blackwell's tensor cores, which take the scales as they are (mx_grouped_gemm_blackwell.py)

Both operands stand with the contracted axis last, so that a weight has two copies: [E, N, K] for x w and [E, K, N] for
dy w^T, each with its blocks along its own last axis. What is computed is the float32 product of the dequantised
operands, whichever implementation runs: e4m3 times a power of two is exact in bfloat16, and so are products of two of
them in float32. Rows past the last group do not exist, as in `grouped_gemm`: they are never read and come out as zero.
There is no gradient: what is straight-through, and what is quantised on the way back, is the caller's recipe.
"""

import functools
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.grouped_gemm import grouped_gemm
from pallas_kernels.grouped_gemm_cpu import grouped_gemm_by_tiles
from pallas_kernels.grouped_gemm_mosaic import target
from pallas_kernels.mx_grouped_gemm_blackwell import mx_grouped_gemm_blackwell, reason_against
from pallas_kernels.mxfp8 import MXArray, dequantize

IMPLEMENTATIONS = ("auto", "emulated", "mosaic")


def mx_grouped_gemm(
    lhs_RK: MXArray, rhs_ENK: MXArray, group_sizes_E: Array, *, dtype: Any, implementation: str = "auto"
) -> Array:
    """out[r] = lhs[r] @ rhs[e]^T for every row r of group e; out[r] = 0 for the rows past the last group.

    lhs_RK, rhs_ENK: blocks along the last axis. group_sizes_E: int32[E], as in `grouped_gemm`. dtype: of the result,
    float32 or bfloat16. implementation: "auto" is mosaic where the program is compiled for Blackwell and the widths
    have a kernel (N and K multiples of 128, bfloat16), else emulated.

    Returns [R, N]. Raises ValueError, one sentence, for operands that do not fit and unknown implementations.
    """
    if implementation not in IMPLEMENTATIONS:
        names = ", ".join(map(repr, IMPLEMENTATIONS))
        raise ValueError(f"mx_grouped_gemm has no implementation {implementation!r}: use one of {names}.")
    fits = lhs_RK.ndim == 2 and rhs_ENK.ndim == 3 and lhs_RK.shape[-1] == rhs_ENK.shape[-1]
    if not fits or lhs_RK.axis != -1 or rhs_ENK.axis != -1 or group_sizes_E.shape != rhs_ENK.shape[:1]:
        raise ValueError(
            "mx_grouped_gemm takes lhs [R, K], rhs [E, N, K], blocks along K, and group_sizes [E], got "
            f"{list(lhs_RK.shape)} (axis {lhs_RK.axis}), {list(rhs_ENK.shape)} (axis {rhs_ENK.axis}) and "
            f"{list(group_sizes_E.shape)}."
        )
    emulated = functools.partial(_emulated, dtype=jnp.dtype(dtype))
    on_cpu = functools.partial(_by_tiles, dtype=jnp.dtype(dtype))
    kernel = functools.partial(_mosaic, dtype=jnp.dtype(dtype))
    operands = lhs_RK, rhs_ENK, group_sizes_E
    if implementation == "mosaic":
        return kernel(*operands)
    roads = {"cpu": on_cpu}
    if implementation == "auto" and has_hardware() and _reason_against(rhs_ENK, dtype) is None:
        roads["cuda"] = kernel
    return lax.platform_dependent(*operands, default=emulated, **roads)


def mx_matmul(lhs_RK: MXArray, rhs_NK: MXArray, *, dtype: Any, implementation: str = "auto") -> Array:
    """out = lhs @ rhs^T, [R, N]: the product with one group that owns all rows; emulated by one dense product."""
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"mx_matmul has no implementation {implementation!r}: use one of {', '.join(IMPLEMENTATIONS)}."
        )
    if (
        lhs_RK.ndim != 2
        or rhs_NK.ndim != 2
        or lhs_RK.shape[1] != rhs_NK.shape[1]
        or (lhs_RK.axis, rhs_NK.axis) != (-1, -1)
    ):
        raise ValueError(
            f"mx_matmul takes lhs [R, K] and rhs [N, K], blocks along K, got {list(lhs_RK.shape)} (axis {lhs_RK.axis}) "
            f"and {list(rhs_NK.shape)} (axis {rhs_NK.axis})."
        )
    one = MXArray(rhs_NK.data[None], rhs_NK.scales[None])

    def dense(lhs: MXArray, rhs: MXArray) -> Array:
        operands, contracted = (dequantize(lhs, dtype), dequantize(rhs, dtype)), (((1,), (1,)), ((), ()))
        return lax.dot_general(*operands, contracted, preferred_element_type=jnp.float32).astype(dtype)

    def kernel(lhs: MXArray, rhs: MXArray) -> Array:
        del rhs
        return _mosaic(lhs, one, jnp.full((1,), lhs.shape[0], jnp.int32), dtype=dtype)

    if implementation == "mosaic":
        return kernel(lhs_RK, rhs_NK)
    if implementation == "auto" and has_hardware() and _reason_against(one, dtype) is None:
        return lax.platform_dependent(lhs_RK, rhs_NK, default=dense, cuda=kernel)
    return dense(lhs_RK, rhs_NK)


def has_hardware() -> bool:
    """Whether programs traced now are meant for a GPU whose tensor cores take MXFP8 as it is."""
    chip = target()
    return chip is not None and chip.architecture == "blackwell"


def _emulated(lhs: MXArray, rhs: MXArray, group_sizes_E: Array, *, dtype: Any) -> Array:
    return grouped_gemm(dequantize(lhs, dtype), dequantize(rhs, dtype), group_sizes_E, transpose_rhs=True)


def _by_tiles(lhs: MXArray, rhs: MXArray, group_sizes_E: Array, *, dtype: Any) -> Array:
    if 0 in lhs.shape or 0 in rhs.shape:
        return jnp.zeros((lhs.shape[0], rhs.shape[1]), dtype)

    def rows_of(start: Array, height: int) -> Array:
        zero = jnp.zeros((), jnp.int32)
        take = lambda x: lax.dynamic_slice(x, (start, zero), (height, x.shape[1]), allow_negative_indices=False)  # noqa: E731
        return dequantize(MXArray(take(lhs.data), take(lhs.scales)), dtype)

    def weight_of(expert: Array) -> Array:
        take = lambda x: lax.dynamic_index_in_dim(x, expert, keepdims=False, allow_negative_indices=False)  # noqa: E731
        return dequantize(MXArray(take(rhs.data), take(rhs.scales)), dtype)

    shape = lhs.shape[0], rhs.shape[1]
    return grouped_gemm_by_tiles(rows_of, weight_of, shape, dtype, group_sizes_E, transpose_rhs=True)


def _reason_against(rhs: MXArray, dtype: Any) -> str | None:
    return "makes bfloat16" if jnp.dtype(dtype) != jnp.bfloat16 else reason_against(*rhs.shape[1:])


def _mosaic(lhs: MXArray, rhs: MXArray, group_sizes_E: Array, *, dtype: Any) -> Array:
    against, chip = _reason_against(rhs, dtype), target()
    if against:
        raise ValueError(f"The MXFP8 kernel {against}: use implementation 'auto' or 'emulated'.")
    if chip is None or chip.architecture != "blackwell":
        raise ValueError("The MXFP8 kernel needs an NVIDIA GPU of compute capability 10.x (B200, B300): use 'auto'.")
    return mx_grouped_gemm_blackwell(lhs, rhs, group_sizes_E, num_sms=chip.num_sms)
