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
from pallas_kernels.routing import TopK, top_k, top_k_reference

__all__ = [
    "TopK",
    "describe_implementation",
    "grouped_gemm",
    "grouped_gemm_reference",
    "grouped_gemm_weight_grad",
    "grouped_gemm_weight_grad_reference",
    "grouped_mlp",
    "grouped_swiglu",
    "grouped_swiglu_reference",
    "resolve_implementation",
    "top_k",
    "top_k_reference",
]
