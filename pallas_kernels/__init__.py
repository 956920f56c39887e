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

__all__ = [
    "grouped_gemm",
    "grouped_gemm_reference",
    "grouped_gemm_weight_grad",
    "grouped_gemm_weight_grad_reference",
    "resolve_implementation",
]
