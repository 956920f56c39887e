"""Grouped matrix products for mixture-of-experts layers: a public op, a reference and the roads behind it.

Every op has a custom VJP and an `implementation` argument; "auto" takes what the platform compiled for does best.
Nothing here imports moejax.
"""

from pallas_kernels.grouped_gemm import (
    grouped_gemm,
    grouped_gemm_reference,
    grouped_gemm_weight_grad,
    grouped_gemm_weight_grad_reference,
    resolve_implementation,
)
from pallas_kernels.mx_grouped_gemm import mx_grouped_gemm, mx_matmul
from pallas_kernels.mxfp8 import MXArray, dequantize, quantize, quantize_two_ways
from pallas_kernels.mxfp8_quantize import quantize_rows, swiglu_quantize

__all__ = [
    "MXArray",
    "dequantize",
    "grouped_gemm",
    "grouped_gemm_reference",
    "grouped_gemm_weight_grad",
    "grouped_gemm_weight_grad_reference",
    "mx_grouped_gemm",
    "mx_matmul",
    "quantize",
    "quantize_rows",
    "quantize_two_ways",
    "resolve_implementation",
    "swiglu_quantize",
]
