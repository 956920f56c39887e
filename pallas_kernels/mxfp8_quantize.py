"""Rows into MXFP8, by the kernel of the GPU that is compiled for, or by XLA: the same bits.

    x_RK --quantize_rows--> MXArray            up_gate_RF --swiglu_quantize--> MXArray of up * silu(gate)

implementation: "auto" is mosaic (mxfp8_mosaic.py) on Hopper and Blackwell where the shape has a kernel, else "xla", the
reference of mxfp8.py, which is what runs on CPU.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels import mxfp8_mosaic
from pallas_kernels.grouped_gemm_mosaic import target
from pallas_kernels.mxfp8 import MXArray, quantize

IMPLEMENTATIONS = ("auto", "xla", "mosaic")


def quantize_rows(x_RK: Array, *, rule: str = "rceil", implementation: str = "auto") -> MXArray:
    """`quantize` along the last axis of [R, K]."""
    reason = mxfp8_mosaic.reason_against(*x_RK.shape)
    return _run(implementation, reason, x_RK, lambda x: quantize(x, rule=rule), mxfp8_mosaic.quantize_mosaic, rule)


def swiglu_quantize(up_gate_RF: Array, *, rule: str = "rceil", implementation: str = "auto") -> MXArray:
    """`quantize(up * silu(gate))` of [R, 2F], up first: computed in float32, rounded to the operand's dtype between."""

    def reference(both: Array) -> MXArray:
        up, gate = jnp.split(both.astype(jnp.float32), 2, axis=-1)
        return quantize((up * jax.nn.silu(gate)).astype(both.dtype), rule=rule)

    reason = mxfp8_mosaic.swiglu_reason_against(*up_gate_RF.shape)
    return _run(implementation, reason, up_gate_RF, reference, mxfp8_mosaic.swiglu_quantize_mosaic, rule)


def _run(
    implementation: str,
    reason: str | None,
    operand: Array,
    reference: Callable[[Array], MXArray],
    kernel: Callable[..., Any],
    rule: str,
) -> MXArray:
    if implementation not in IMPLEMENTATIONS:
        names = ", ".join(map(repr, IMPLEMENTATIONS))
        raise ValueError(f"Quantising has no implementation {implementation!r}: use one of {names}.")
    if implementation == "mosaic" and reason:
        raise ValueError(f"The kernel that makes MXFP8 {reason}: use implementation 'auto' or 'xla'.")
    by_kernel = lambda x: kernel(x, rule=rule)  # noqa: E731
    if implementation == "mosaic":
        return by_kernel(operand)
    roads = {"cuda": by_kernel} if implementation == "auto" and reason is None and target() is not None else {}
    return lax.platform_dependent(operand, default=reference, **roads)
