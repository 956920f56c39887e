"""Grouped matrix products and routing for mixture-of-experts layers: public ops, references and the roads behind them.

Every op has a custom VJP and an `implementation` argument; "auto" takes what the platform compiled for does best.
Nothing here imports moejax.
"""

from pallas_kernels.grouped_gemm import (
    describe_implementation,
    grouped_gemm,
    grouped_gemm_reference,
    grouped_gemm_weight_grad,
    grouped_gemm_weight_grad_reference,
    resolve_implementation,
)
from pallas_kernels.grouped_swiglu import grouped_mlp, grouped_swiglu, grouped_swiglu_reference
from pallas_kernels.mx_grouped_gemm import mx_grouped_gemm, mx_matmul
from pallas_kernels.mxfp8 import MXArray, dequantize, quantize, quantize_two_ways
from pallas_kernels.mxfp8_quantize import quantize_rows, swiglu_quantize
from pallas_kernels.routing import TopK, top_k, top_k_reference

__all__ = [
    "MXArray",
    "TopK",
    "dequantize",
    "describe_implementation",
    "grouped_gemm",
    "grouped_gemm_reference",
    "grouped_gemm_weight_grad",
    "grouped_gemm_weight_grad_reference",
    "grouped_mlp",
    "grouped_swiglu",
    "grouped_swiglu_reference",
    "mx_grouped_gemm",
    "mx_matmul",
    "quantize",
    "quantize_rows",
    "quantize_two_ways",
    "resolve_implementation",
    "swiglu_quantize",
    "top_k",
    "top_k_reference",
]
