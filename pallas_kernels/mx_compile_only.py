"""The MXFP8 kernels as `compile_only` compiles them: the function of each, and the operands it is given.

mx_forward: [rows, width] x [groups, hidden, width], both in MXFP8. mx_quantize: bfloat16[rows, width] into MXFP8.
mx_swiglu_quantize: the same behind SwiGLU, [rows, 2 hidden].
"""

import functools
from collections.abc import Callable
from typing import Any

MX_KERNELS = ("mx_forward", "mx_quantize", "mx_swiglu_quantize")


def described(
    kernel: str, num_sms: int, *, rows: int, width: int, hidden: int, groups: int
) -> tuple[Callable[..., Any], list[tuple[tuple[int, ...], Any]]]:
    """(function, shape and dtype of its operands but the group sizes, which come last and go unused in two of them)."""
    import jax.numpy as jnp

    from pallas_kernels.mx_grouped_gemm_blackwell import mx_grouped_gemm_blackwell
    from pallas_kernels.mxfp8 import BLOCK, MXArray
    from pallas_kernels.mxfp8_mosaic import quantize_mosaic, swiglu_quantize_mosaic

    if kernel == "mx_forward":

        def forward(lhs: Any, lhs_scales: Any, rhs: Any, rhs_scales: Any, sizes: Any) -> Any:
            operands = MXArray(lhs, lhs_scales), MXArray(rhs, rhs_scales)
            return mx_grouped_gemm_blackwell(*operands, sizes, num_sms=num_sms)

        shapes = (rows, width), (groups, hidden, width)
        data = [(shape, jnp.float8_e4m3fn) for shape in shapes]
        scales = [((*shape[:-1], shape[-1] // BLOCK), jnp.uint8) for shape in shapes]
        return forward, [data[0], scales[0], data[1], scales[1]]
    function = functools.partial(
        {"mx_quantize": quantize_mosaic, "mx_swiglu_quantize": swiglu_quantize_mosaic}[kernel], rule="rceil"
    )
    columns = width if kernel == "mx_quantize" else 2 * hidden

    return (lambda x, sizes: function(x)), [((rows, columns), jnp.bfloat16)]
