"""Weights that are kept in MXFP8, and the linear layer that multiplies by one.

    master (fp32) --once an optimizer step--> QuantisedWeight: one copy for x w, one for dy w^T      (parallel/step.py)

    forward     x --quantise--> x_q     y = x_q w_q                     in the dtype of x
    backward    dy --quantise--> dy_q   dx = dy_q w_q'^T     dw = dequantised x_q ^T dy, a product in the dtype of x

A product has both operands quantised along the axis that is contracted, so the two copies are two roundings of the same
weight. Rounding has no derivative: gradients are straight-through, those of the unrounded product at rounded operands.
The quantised weight reaches its layer beside the parameters (`Context.quantised`); where the parameter stands there is
something of its shape alone, to which the gradient belongs, and nothing of it is read.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Float, PyTree

from pallas_kernels import MXArray, dequantize, mx_grouped_gemm, mx_matmul, quantize, quantize_rows, swiglu_quantize

QUANTISED = "mxfp8"  # the name of values that are kept for the backward as they are, and not what they came from


@dataclass(frozen=True)
class MXRecipe:
    """How it is computed. rule: of the scales. keep_hidden: keep the experts' first product in MX for the backward,
    else in the dtype of activations. implementation: of `mx_grouped_gemm`."""

    rule: str = "rceil"
    keep_hidden: bool = True
    implementation: str = "auto"

    def quantize(self, rows: Array) -> MXArray:
        return quantize_rows(rows, rule=self.rule)

    def swiglu_quantize(self, up_gate: Array) -> MXArray:
        return swiglu_quantize(up_gate, rule=self.rule)

    def grouped_gemm(self, lhs: MXArray, rhs: MXArray, group_sizes: Array, dtype: Any) -> Array:
        return mx_grouped_gemm(lhs, rhs, group_sizes, dtype=dtype, implementation=self.implementation)

    def matmul(self, lhs: MXArray, rhs: MXArray, dtype: Any) -> Array:
        return mx_matmul(lhs, rhs, dtype=dtype, implementation=self.implementation)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("forward", "backward", "plain"), meta_fields=("tail",)
)
@dataclass(frozen=True)
class QuantisedWeight:
    """A weight [..., *tail] seen as a matrix [..., K, N], K contracted in the forward.

    forward: [..., N, K], backward: [..., K, N], blocks along the last axis of each. plain: the weight as others are
    kept, or None. tail: the axes that the matrix is made of; those before are layers and experts.
    """

    forward: Any
    backward: Any
    plain: Any
    tail: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the weight itself."""
        return (*self.backward.data.shape[:-2], *self.tail)


def quantise_weight(
    weight: Float[Array, "..."], lead: int, contracted: int, plain: Array | None, rule: str
) -> QuantisedWeight:
    """weight: fp32. lead: axes of layers and experts; contracted: of the others, the first so many are K."""
    tail = weight.shape[lead:]
    depth = math.prod(tail[:contracted])
    matrix = weight.reshape(*weight.shape[:lead], depth, -1)
    return QuantisedWeight(quantize(matrix, -2, rule=rule).transposed(), quantize(matrix, -1, rule=rule), plain, tail)


def is_quantised(x: Any) -> bool:
    return isinstance(x, QuantisedWeight)


def separate(params: PyTree[Any], dtype: Any) -> tuple[PyTree[Array], PyTree[Any]]:
    """(what gradients belong to, quantised weights): the first in the shape of the parameters, the second with None
    where nothing is quantised."""

    def own(leaf: Any) -> Any:
        if not is_quantised(leaf):
            return leaf
        return jnp.zeros(leaf.shape, dtype) if leaf.plain is None else leaf.plain

    quantised = jax.tree.map(lambda p: p if is_quantised(p) else None, params, is_leaf=is_quantised)
    return jax.tree.map(own, params, is_leaf=is_quantised), quantised


def keep(array: PyTree[Array]) -> PyTree[Array]:
    """Marks quantised values for `parallel/block_program.py`: they stay, rather than the larger ones before them."""
    return jax.tree.map(lambda x: checkpoint_name(x, QUANTISED), array)


def unless(excluded: Array | None, plain: Callable[..., Any], in_mx: Callable[..., Any], *operands: Any) -> Any:
    """in_mx(*operands), or plain(*operands) in a layer that is excluded (a scalar, known when the program runs)."""
    return in_mx(*operands) if excluded is None else lax.cond(excluded, plain, in_mx, *operands)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def mx_linear(
    x: Float[Array, "... K"], weight: Float[Array, "..."], quantised: QuantisedWeight, recipe: MXRecipe
) -> Float[Array, "... N"]:
    """y = x w, both in MX; `weight` only receives the gradient. Any leading axes; K and N may stand for several."""
    return _linear_forward(x, weight, quantised, recipe)[0]


def _linear_forward(x: Array, weight: Array, quantised: QuantisedWeight, recipe: MXRecipe) -> tuple[Array, Any]:
    rows = x.reshape(-1, x.shape[-1])
    x_q = recipe.quantize(rows)
    y = recipe.matmul(x_q, quantised.forward, x.dtype)
    return y.reshape(*x.shape[:-1], -1), (x_q, weight, quantised)


def _linear_backward(recipe: MXRecipe, residuals: Any, grad: Array) -> tuple[Array, Array, None]:
    x_q, weight, quantised = residuals
    rows = grad.reshape(-1, grad.shape[-1])
    dx = recipe.matmul(recipe.quantize(rows), quantised.backward, grad.dtype)
    contracted = (((0,), (0,)), ((), ()))
    dw = lax.dot_general(dequantize(x_q, grad.dtype), rows, contracted, preferred_element_type=jnp.float32)
    return dx.reshape(*grad.shape[:-1], -1), dw.reshape(weight.shape).astype(weight.dtype), None


mx_linear.defvjp(_linear_forward, _linear_backward)
