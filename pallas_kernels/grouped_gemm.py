"""Grouped GEMM: each row times the matrix of its own expert, with gradients, on whatever machine compiles it.

    lhs_RD, rhs_EDF, group_sizes_E --check--> implementation --> out_RF
                                                 |-- loop    CPU, tiles of rows                 (grouped_gemm_cpu.py)
                                                 |-- mosaic  Hopper and Blackwell, bf16         (grouped_gemm_mosaic.py)
                                                 |-- xla     lax.ragged_dot_general             (everything else)
                                                 `-- tokamax by request, if installed          (grouped_gemm_library.py)
    backward:  d lhs = grouped_gemm(d out, rhs read transposed)       d rhs = grouped_gemm_weight_grad(lhs, d out)

Rows stand expert-major, as dispatch leaves them: group e owns rows [offset_e, offset_e + group_sizes[e]), offset_e
being the sum of the sizes before it. Rows past the last group do not exist: whatever they hold, NaN included, reaches
no result and no gradient, and they come out as zero.

An implementation is three functions in `_IMPLEMENTATIONS`; "auto" asks which platform the program is lowered for,
so a program compiled on a CPU machine for an absent GPU takes the GPU's road. On CUDA that road is "mosaic" where the
operands and the GPU have a kernel (bfloat16, D and F multiples of 64, compute capability 9.0 or 10.x), else "xla".
"""

import functools
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.core import Tracer
from jax.typing import ArrayLike, DTypeLike

from pallas_kernels.grouped_gemm_cpu import grouped_gemm_loop, grouped_gemm_weight_grad_loop
from pallas_kernels.grouped_gemm_library import (
    grouped_gemm_tokamax,
    grouped_gemm_weight_grad_tokamax,
    grouped_gemm_weight_grad_xla,
    grouped_gemm_xla,
    require_tokamax,
)
from pallas_kernels.grouped_gemm_mosaic import (
    grouped_gemm_mosaic,
    grouped_gemm_weight_grad_mosaic,
    grouped_swiglu_mosaic,
    reason_against,
    target,
)

DEBUG = "GROUPED_GEMM_DEBUG"
_DTYPES = (jnp.float32.dtype, jnp.bfloat16.dtype)


def grouped_gemm(
    lhs_RD: Array, rhs_EDF: Array, group_sizes_E: Array, *, transpose_rhs: bool = False, implementation: str = "auto"
) -> Array:
    """out[r] = lhs[r] @ rhs[e] for every row r of group e; out[r] = 0 for the rows past the last group.

    lhs_RD: [R, D], float32 or bfloat16, expert-major.
    rhs_EDF: [E, D, F] in the dtype of lhs; with `transpose_rhs` [E, F, D], read transposed, never copied whole.
    group_sizes_E: int32[E], rows per group; zeros allowed, sum at most R. Values are data: no recompilation, no check.
    implementation: "auto" (what the platform compiled for does best), "loop", "mosaic", "xla" or "tokamax".

    Returns [R, F] in the dtype of lhs; products are summed in float32. Differentiable, twice as well, in lhs and rhs by
    reverse mode. Raises ValueError or TypeError, one sentence with the shapes, for operands that do not fit and for an
    implementation that does not exist.
    """
    check_operands("grouped_gemm", lhs_RD, rhs_EDF, group_sizes_E, transpose_rhs, implementation)
    return _gemm(lhs_RD, rhs_EDF, group_sizes_E, transpose_rhs, implementation)


def grouped_gemm_weight_grad(
    lhs_RD: Array, grad_RF: Array, group_sizes_E: Array, *, implementation: str = "auto"
) -> Array:
    """out[e] = lhs[rows of e]^T @ grad[rows of e]: the gradient of `grouped_gemm` in its weights; 0 for an empty group.

    lhs_RD: [R, D] and grad_RF: [R, F], both float32 or both bfloat16; group_sizes_E: int32[E], as in `grouped_gemm`.
    Returns [E, D, F] in the dtype of lhs, summed in float32. Errors as in `grouped_gemm`.
    """
    _check_implementation(implementation)
    operands = f"lhs {describe(lhs_RD)}, grad {describe(grad_RF)}, group_sizes {describe(group_sizes_E)}"
    if lhs_RD.ndim != 2 or grad_RF.ndim != 2 or group_sizes_E.ndim != 1 or lhs_RD.shape[0] != grad_RF.shape[0]:
        raise ValueError(f"grouped_gemm_weight_grad takes lhs [R, D], grad [R, F] and group_sizes [E], got {operands}.")
    _check_dtypes("grouped_gemm_weight_grad", lhs_RD, grad_RF, group_sizes_E, operands)
    check_group_sizes("grouped_gemm_weight_grad", group_sizes_E, lhs_RD.shape[0])
    return _weight_grad(lhs_RD, grad_RF, group_sizes_E, implementation)


def grouped_gemm_reference(
    lhs_RD: ArrayLike, rhs_EDF: ArrayLike, group_sizes_E: ArrayLike, *, transpose_rhs: bool = False
) -> np.ndarray:
    """`grouped_gemm` in float64 numpy, one dense product per group; what tests and benchmarks compare with. [R, F]."""
    lhs_RD, rhs_EDF = np.asarray(lhs_RD, np.float64), np.asarray(rhs_EDF, np.float64)
    out_RF = np.zeros((lhs_RD.shape[0], rhs_EDF.shape[1 if transpose_rhs else 2]))
    for weight, rows in zip(rhs_EDF, _group_rows(group_sizes_E), strict=True):
        out_RF[rows] = lhs_RD[rows] @ (weight.T if transpose_rhs else weight)
    return out_RF


def grouped_gemm_weight_grad_reference(lhs_RD: ArrayLike, grad_RF: ArrayLike, group_sizes_E: ArrayLike) -> np.ndarray:
    """`grouped_gemm_weight_grad` in float64 numpy. [E, D, F]."""
    lhs_RD, grad_RF = np.asarray(lhs_RD, np.float64), np.asarray(grad_RF, np.float64)
    return np.stack([lhs_RD[rows].T @ grad_RF[rows] for rows in _group_rows(group_sizes_E)])


def resolve_implementation(
    implementation: str = "auto",
    platform: str | None = None,
    *,
    dtype: DTypeLike = jnp.bfloat16,
    widths: tuple[int, ...] = (),
) -> str:
    """What `implementation` means on `platform` ("cpu", "cuda", ...; default: the backend of this process).

    dtype, widths: of the operands, and their D and F; on CUDA both decide. "auto" becomes a name, so that a run can
    print and save what it computes with. Raises ValueError for an unknown one.
    """
    _check_implementation(implementation)
    if implementation != "auto":
        return implementation
    platform = platform or jax.default_backend()
    return _auto_on_cuda(dtype, *widths) if platform in ("cuda", "gpu") else _AUTO.get(platform, _AUTO_ELSEWHERE)


def _swiglu_by(product: Callable[..., Array]) -> Callable[..., tuple[Array, ...]]:
    """The product, and SwiGLU as XLA fuses it."""

    def swiglu(lhs_RD: Array, rhs: Array, group_sizes_E: Array, *, keep: bool) -> tuple[Array, ...]:
        up_gate_R2F = product(lhs_RD, rhs, group_sizes_E, transpose_rhs=False)
        hidden_RF = swiglu_rows(up_gate_R2F)
        return (hidden_RF, up_gate_R2F) if keep else (hidden_RF,)

    return swiglu


class _Implementation(NamedTuple):
    gemm: Callable[..., Array]  # (lhs_RD, rhs, group_sizes_E, *, transpose_rhs) -> out_RF
    weight_grad: Callable[..., Array]  # (lhs_RD, grad_RF, group_sizes_E) -> out_EDF
    swiglu: Callable[..., tuple[Array, ...]]  # (lhs_RD, rhs_ED2F, group_sizes_E, *, keep) -> hidden_RF[, up_gate_R2F]


_IMPLEMENTATIONS = {
    "loop": _Implementation(grouped_gemm_loop, grouped_gemm_weight_grad_loop, _swiglu_by(grouped_gemm_loop)),
    "mosaic": _Implementation(grouped_gemm_mosaic, grouped_gemm_weight_grad_mosaic, grouped_swiglu_mosaic),
    "xla": _Implementation(grouped_gemm_xla, grouped_gemm_weight_grad_xla, _swiglu_by(grouped_gemm_xla)),
    "tokamax": _Implementation(
        grouped_gemm_tokamax, grouped_gemm_weight_grad_tokamax, _swiglu_by(grouped_gemm_tokamax)
    ),
}
_AUTO = {"cpu": "loop"}
_AUTO_ELSEWHERE = "xla"


def describe_implementation(platform: str, dtype: DTypeLike, widths: tuple[int, ...]) -> str:
    """What "auto" takes on `platform` for this dtype and these D and F, and on a GPU why our kernels are not it."""
    chosen = resolve_implementation("auto", platform, dtype=dtype, widths=widths)
    if platform not in ("cuda", "gpu") or chosen == "mosaic":
        return repr(chosen)
    against = reason_against(jnp.dtype(dtype), *widths) or "needs a GPU of compute capability 9.0 or 10.x"
    return f"{chosen!r}, since 'mosaic' {against}"


def swiglu_rows(up_gate_R2F: Array) -> Array:
    """up * silu(gate) in fp32, rounded to the dtype of the input. [..., 2F] -> [..., F]."""
    up, gate = jnp.split(up_gate_R2F.astype(jnp.float32), 2, axis=-1)
    return (up * jax.nn.silu(gate)).astype(up_gate_R2F.dtype)


def _auto_on_cuda(dtype: DTypeLike, *widths: int) -> str:
    return "xla" if target() is None or reason_against(jnp.dtype(dtype), *widths) else "mosaic"


def run(road: str, implementation: str, *operands: Array, **options: bool) -> Any:
    """Call `road` ("gemm", "weight_grad" or "swiglu") of an implementation; "auto" is settled when a platform is
    lowered for."""

    def of(name: str) -> Callable[..., Any]:
        return functools.partial(getattr(_IMPLEMENTATIONS[name], road), **options)

    if implementation != "auto":
        return of(implementation)(*operands)
    lhs, other, _ = operands
    names = _AUTO | {"cuda": _auto_on_cuda(lhs.dtype, lhs.shape[1], *other.shape[1:])}
    platforms = {platform: of(name) for platform, name in names.items() if name != _AUTO_ELSEWHERE}
    return lax.platform_dependent(*operands, default=of(_AUTO_ELSEWHERE), **platforms)


# What is differentiated. The three products are closed under differentiation: each gradient is one of them again.


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _gemm(lhs_RD: Array, rhs: Array, group_sizes_E: Array, transpose_rhs: bool, implementation: str) -> Array:
    if 0 in lhs_RD.shape or 0 in rhs.shape:
        return jnp.zeros((lhs_RD.shape[0], rhs.shape[1 if transpose_rhs else 2]), lhs_RD.dtype)
    return run("gemm", implementation, lhs_RD, rhs, group_sizes_E, transpose_rhs=transpose_rhs)


def _gemm_forward(lhs_RD: Array, rhs: Array, group_sizes_E: Array, transpose_rhs: bool, implementation: str) -> Any:
    return _gemm(lhs_RD, rhs, group_sizes_E, transpose_rhs, implementation), (lhs_RD, rhs, group_sizes_E)


def _gemm_backward(transpose_rhs: bool, implementation: str, saved: tuple[Array, Array, Array], grad_RF: Array) -> Any:
    lhs_RD, rhs, group_sizes_E = saved
    lhs_grad_RD = _gemm(grad_RF, rhs, group_sizes_E, not transpose_rhs, implementation)
    factors = (grad_RF, lhs_RD) if transpose_rhs else (lhs_RD, grad_RF)
    return lhs_grad_RD, _weight_grad(*factors, group_sizes_E, implementation), no_gradient(group_sizes_E)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _weight_grad(lhs_RD: Array, grad_RF: Array, group_sizes_E: Array, implementation: str) -> Array:
    if 0 in lhs_RD.shape or 0 in grad_RF.shape or 0 in group_sizes_E.shape:
        return jnp.zeros((group_sizes_E.shape[0], lhs_RD.shape[1], grad_RF.shape[1]), lhs_RD.dtype)
    return run("weight_grad", implementation, lhs_RD, grad_RF, group_sizes_E)


def _weight_grad_forward(lhs_RD: Array, grad_RF: Array, group_sizes_E: Array, implementation: str) -> Any:
    return _weight_grad(lhs_RD, grad_RF, group_sizes_E, implementation), (lhs_RD, grad_RF, group_sizes_E)


def _weight_grad_backward(implementation: str, saved: tuple[Array, Array, Array], cotangent_EDF: Array) -> Any:
    lhs_RD, grad_RF, group_sizes_E = saved
    lhs_cotangent_RD = _gemm(grad_RF, cotangent_EDF, group_sizes_E, True, implementation)
    grad_cotangent_RF = _gemm(lhs_RD, cotangent_EDF, group_sizes_E, False, implementation)
    return lhs_cotangent_RD, grad_cotangent_RF, no_gradient(group_sizes_E)


_gemm.defvjp(_gemm_forward, _gemm_backward)
_weight_grad.defvjp(_weight_grad_forward, _weight_grad_backward)


def no_gradient(group_sizes_E: Array) -> np.ndarray:
    return np.zeros(group_sizes_E.shape, jax.dtypes.float0)


def _group_rows(group_sizes_E: ArrayLike) -> list[slice]:
    ends = np.cumsum(np.asarray(group_sizes_E)).tolist()
    return [slice(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]


def check_operands(
    op: str, lhs_RD: Array, rhs_EDF: Array, group_sizes_E: Array, transpose_rhs: bool, implementation: str
) -> None:
    """Raises what `grouped_gemm` says it raises; `op` is whose operands these are."""
    _check_implementation(implementation)
    operands = f"lhs {describe(lhs_RD)}, rhs {describe(rhs_EDF)}, group_sizes {describe(group_sizes_E)}"
    layout = "[E, F, D] (transpose_rhs)" if transpose_rhs else "[E, D, F]"
    if lhs_RD.ndim != 2 or rhs_EDF.ndim != 3 or group_sizes_E.ndim != 1:
        raise ValueError(f"{op} takes lhs [R, D], rhs {layout} and group_sizes [E], got {operands}.")
    if lhs_RD.shape[1] != rhs_EDF.shape[2 if transpose_rhs else 1] or rhs_EDF.shape[0] != group_sizes_E.shape[0]:
        raise ValueError(f"D and E must agree in lhs [R, D], rhs {layout} and group_sizes [E], got {operands}.")
    _check_dtypes(op, lhs_RD, rhs_EDF, group_sizes_E, operands)
    check_group_sizes(op, group_sizes_E, lhs_RD.shape[0])


def check_group_sizes(op: str, group_sizes_E: Array, rows: int) -> None:
    """With GROUPED_GEMM_DEBUG=1 in the environment sizes are looked at on the host whenever the op runs, and a negative
    one, or a sum above the rows, raises ValueError; out of a compiled program, JaxRuntimeError with its sentence.
    """
    if os.environ.get(DEBUG, "0") in ("", "0"):
        return

    def look(sizes_E: np.ndarray) -> None:
        sizes = np.asarray(sizes_E).tolist()
        if min(sizes, default=0) < 0 or sum(sizes) > rows:
            raise ValueError(
                f"{op} takes group_sizes that are not negative and sum to at most the {rows} rows of lhs, got {sizes} "
                f"with sum {sum(sizes)}."
            )

    look(group_sizes_E) if not isinstance(group_sizes_E, Tracer) else jax.debug.callback(look, group_sizes_E)


def _check_implementation(implementation: str) -> None:
    if implementation != "auto" and implementation not in _IMPLEMENTATIONS:
        names = ", ".join(repr(name) for name in ("auto", *_IMPLEMENTATIONS))
        raise ValueError(f"grouped_gemm has no implementation {implementation!r}: use one of {names}.")
    if implementation == "tokamax":
        require_tokamax()


def _check_dtypes(op: str, first: Array, second: Array, group_sizes_E: Array, operands: str) -> None:
    if first.dtype not in _DTYPES or second.dtype != first.dtype:
        raise TypeError(f"{op} takes two float32 or two bfloat16 operands (cast one with .astype), got {operands}.")
    if group_sizes_E.dtype != jnp.int32:
        raise TypeError(f"{op} takes group_sizes as int32, got {operands}.")


def describe(array: Array) -> str:
    return f"{array.dtype}[{', '.join(map(str, array.shape))}]"
