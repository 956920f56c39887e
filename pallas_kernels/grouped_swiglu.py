"""SwiGLU experts: gate and up as one grouped product with SwiGLU at its end, and the whole expert MLP made of it.

    rows_RD, [E, D, 2F] --grouped_swiglu--> hidden_RF --grouped_gemm with [E, F, D]--> out_RD        (grouped_mlp)
    kept for the backward: up_gate_R2F, from which hidden is computed again

On a GPU with kernels one pass does it: a tile holds the columns of up and the columns of gate that belong to them, and
what is stored is up * silu(gate); with a backward to come, up and gate as well. That saves the elementwise pass which
would read 2F and write F values a row. Elsewhere it is the grouped product and that elementwise pass.

up * silu(gate) is taken of values rounded to the operands' dtype, in fp32, and rounded once; so hidden rows computed
again from what was kept are those of the forward to the bit, whichever road made them.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.typing import ArrayLike

from pallas_kernels.grouped_gemm import (
    check_operands,
    describe,
    grouped_gemm,
    grouped_gemm_reference,
    grouped_gemm_weight_grad,
    no_gradient,
    run,
    swiglu_rows,
)


def grouped_swiglu(
    lhs_RD: Array, up_gate_ED2F: Array, group_sizes_E: Array, *, implementation: str = "auto", save_as: str = ""
) -> Array:
    """out[r] = up * silu(gate), [up, gate] = lhs[r] @ up_gate[e], for every row r of group e; 0 past the last group.

    lhs_RD: [R, D], float32 or bfloat16, expert-major. up_gate_ED2F: [E, D, 2F] in the dtype of lhs, the F columns of up
    before those of gate (Olmo-core `w_up_gate`). group_sizes_E, implementation: as in `grouped_gemm`.
    save_as: name of [up, gate], which the backward needs, for policies of `jax.checkpoint`; "" for none.

    Returns [R, F] in the dtype of lhs. Differentiable in lhs and up_gate by reverse mode. Errors as in `grouped_gemm`.
    """
    _check(lhs_RD, up_gate_ED2F, group_sizes_E, implementation)
    return _swiglu(lhs_RD, up_gate_ED2F, group_sizes_E, implementation, save_as)


def grouped_mlp(
    lhs_RD: Array,
    up_gate_ED2F: Array,
    down_EFD: Array,
    group_sizes_E: Array,
    *,
    implementation: str = "auto",
    save_as: str = "",
) -> Array:
    """out[r] = grouped_swiglu(lhs, up_gate)[r] @ down[e] for every row r of group e; 0 past the last group.

    down_EFD: [E, F, D] in the dtype of lhs; the others as in `grouped_swiglu`. Returns [R, D] in the dtype of lhs.
    Of the forward it keeps lhs and [up, gate], not the hidden rows: 2F values a row instead of 3F.
    """
    _check(lhs_RD, up_gate_ED2F, group_sizes_E, implementation)
    if down_EFD.ndim != 3 or down_EFD.shape[:2] != (up_gate_ED2F.shape[0], up_gate_ED2F.shape[2] // 2):
        raise ValueError(
            "grouped_mlp takes up_gate [E, D, 2F] and down [E, F, D], got up_gate "
            f"{describe(up_gate_ED2F)}, down {describe(down_EFD)}."
        )
    if down_EFD.dtype != lhs_RD.dtype:
        raise TypeError(
            "grouped_mlp takes operands of one dtype (cast with .astype), got "
            f"lhs {describe(lhs_RD)}, down {describe(down_EFD)}."
        )
    return _mlp(lhs_RD, up_gate_ED2F, down_EFD, group_sizes_E, implementation, save_as)


def grouped_swiglu_reference(lhs_RD: ArrayLike, up_gate_ED2F: ArrayLike, group_sizes_E: ArrayLike) -> np.ndarray:
    """`grouped_swiglu` in float64 numpy, with nothing rounded between. [R, F]."""
    up, gate = np.split(grouped_gemm_reference(lhs_RD, up_gate_ED2F, group_sizes_E), 2, axis=1)
    return up * gate / (1 + np.exp(-gate))


def _swiglu_pullback(up_gate_R2F: Array, grad_RF: Array) -> Array:
    """The gradient of up * silu(gate); with s = sigmoid(gate): d up = g gate s, d gate = g up s (1 + gate (1 - s))."""
    up, gate = jnp.split(up_gate_R2F.astype(jnp.float32), 2, axis=-1)
    grad, s = grad_RF.astype(jnp.float32), jax.nn.sigmoid(gate)
    return jnp.concatenate([grad * gate * s, grad * up * s * (1 + gate * (1 - s))], -1).astype(up_gate_R2F.dtype)


def _check(lhs_RD: Array, up_gate_ED2F: Array, group_sizes_E: Array, implementation: str) -> None:
    check_operands("grouped_swiglu", lhs_RD, up_gate_ED2F, group_sizes_E, False, implementation)
    if up_gate_ED2F.shape[2] % 2:
        raise ValueError(f"grouped_swiglu takes up_gate [E, D, 2F], got up_gate {describe(up_gate_ED2F)}.")


def _hidden(lhs_RD: Array, up_gate: Array, group_sizes_E: Array, implementation: str, keep: bool) -> tuple[Array, ...]:
    """(hidden,), or (hidden, up_gate) if `keep`."""
    rows, width = lhs_RD.shape[0], up_gate.shape[2] // 2
    if 0 in lhs_RD.shape or 0 in up_gate.shape:
        return tuple(jnp.zeros((rows, n), lhs_RD.dtype) for n in ((width, 2 * width) if keep else (width,)))
    return run("swiglu", implementation, lhs_RD, up_gate, group_sizes_E, keep=keep)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _swiglu(lhs_RD: Array, up_gate: Array, group_sizes_E: Array, implementation: str, save_as: str) -> Array:
    return _hidden(lhs_RD, up_gate, group_sizes_E, implementation, keep=False)[0]


def _swiglu_forward(lhs_RD: Array, weight: Array, group_sizes_E: Array, implementation: str, save_as: str) -> Any:
    hidden_RF, up_gate_R2F = _hidden(lhs_RD, weight, group_sizes_E, implementation, keep=True)
    return hidden_RF, (lhs_RD, weight, group_sizes_E, _named(up_gate_R2F, save_as))


def _swiglu_backward(implementation: str, save_as: str, saved: tuple[Array, ...], grad_RF: Array) -> Any:
    lhs_RD, weight, group_sizes_E, up_gate_R2F = saved
    grad_R2F = _swiglu_pullback(up_gate_R2F, grad_RF)
    return *_product_gradients(lhs_RD, weight, group_sizes_E, grad_R2F, implementation), no_gradient(group_sizes_E)


_swiglu.defvjp(_swiglu_forward, _swiglu_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _mlp(lhs_RD: Array, up_gate: Array, down: Array, group_sizes_E: Array, implementation: str, save_as: str) -> Array:
    hidden_RF = _swiglu(lhs_RD, up_gate, group_sizes_E, implementation, save_as)
    return grouped_gemm(hidden_RF, down, group_sizes_E, implementation=implementation)


def _mlp_forward(
    lhs_RD: Array, up_gate: Array, down: Array, group_sizes_E: Array, implementation: str, save_as: str
) -> Any:
    hidden_RF, up_gate_R2F = _hidden(lhs_RD, up_gate, group_sizes_E, implementation, keep=True)
    out_RD = grouped_gemm(hidden_RF, down, group_sizes_E, implementation=implementation)
    return out_RD, (lhs_RD, up_gate, down, group_sizes_E, _named(up_gate_R2F, save_as))


def _mlp_backward(implementation: str, save_as: str, saved: tuple[Array, ...], grad_RD: Array) -> Any:
    lhs_RD, up_gate, down, group_sizes_E, up_gate_R2F = saved
    grad_RF, down_grad = _product_gradients(swiglu_rows(up_gate_R2F), down, group_sizes_E, grad_RD, implementation)
    grad_R2F = _swiglu_pullback(up_gate_R2F, grad_RF)
    lhs_grad, up_gate_grad = _product_gradients(lhs_RD, up_gate, group_sizes_E, grad_R2F, implementation)
    return lhs_grad, up_gate_grad, down_grad, no_gradient(group_sizes_E)


_mlp.defvjp(_mlp_forward, _mlp_backward)


def _product_gradients(
    lhs: Array, weight: Array, group_sizes_E: Array, grad: Array, implementation: str
) -> tuple[Array, Array]:
    lhs_grad = grouped_gemm(grad, weight, group_sizes_E, transpose_rhs=True, implementation=implementation)
    return lhs_grad, grouped_gemm_weight_grad(lhs, grad, group_sizes_E, implementation=implementation)


def _named(up_gate_R2F: Array, name: str) -> Array:
    return checkpoint_name(up_gate_R2F, name) if name else up_gate_R2F
