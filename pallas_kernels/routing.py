"""Routing: which k experts a token goes to, from its logits, with what the losses want to know, in one pass.

    logits_TE --top_k--> values_TK, ids_TK, lse_T, counts_E
                          |-- mosaic  Hopper and Blackwell: the logits are read once         (routing_mosaic.py)
                          `-- xla     lax.top_k, logsumexp, a scatter                        (everything else)

Softmax weights are exp(values - lse). For 16,384 tokens and 128 experts XLA makes eight GPU kernels of it, which read
the logits three times; its top-k sorts every row whole and writes all 128 sorted values and ids, 16.8 MB (compiled for
an absent H200, 2026-11). What follows routing stays XLA's: docs/kernels.md has the programs that say why.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike

from pallas_kernels.grouped_gemm_mosaic import target
from pallas_kernels.routing_mosaic import reason_against, top_k_mosaic

IMPLEMENTATIONS = ("auto", "mosaic", "xla")


class TopK(NamedTuple):
    """values: [T, K], falling, the dtype of the logits. ids: int32[T, K], different in a row, ties to the lower id.
    lse: [T], log-sum-exp of the row. counts: int32[E], rows that chose an expert.
    """

    values: Array
    ids: Array
    lse: Array
    counts: Array


def top_k(logits_TE: Array, k: int, *, implementation: str = "auto") -> TopK:
    """The k largest logits of every row, as `lax.top_k` finds them, with the row's log-sum-exp and the experts' counts.

    logits_TE: [T, E], floating; -inf where an expert is out of reach. NaN is undefined.
    implementation: "auto" (the kernel on a GPU that has one, for float32 and a multiple of 8 experts up to 256; else
    "xla"), "mosaic" or "xla".

    Differentiable in the logits, through values and lse, by reverse mode; ids and counts have no gradient.
    Raises ValueError or TypeError, one sentence with the shapes, for what does not fit or cannot run here.
    """
    if implementation not in IMPLEMENTATIONS:
        names = ", ".join(map(repr, IMPLEMENTATIONS))
        raise ValueError(f"top_k has no implementation {implementation!r}: use one of {names}.")
    shape = f"{logits_TE.dtype}[{', '.join(map(str, logits_TE.shape))}]"
    if logits_TE.ndim != 2 or not 1 <= k <= logits_TE.shape[-1]:
        raise ValueError(f"top_k takes logits [T, E] and 1 <= k <= E, got logits {shape} and k={k}.")
    if not jnp.issubdtype(logits_TE.dtype, jnp.floating):
        raise TypeError(f"top_k takes floating logits (cast with .astype), got logits {shape}.")
    if implementation == "mosaic":
        against = reason_against(logits_TE.dtype, logits_TE.shape[1], k)
        if against or target() is None:
            against = against or "needs an NVIDIA GPU of compute capability 9.0 or 10.x"
            raise ValueError(f"top_k implementation 'mosaic' {against}: use 'auto' or 'xla', logits are {shape}.")
    return TopK(*_top_k(logits_TE, k, implementation))


def top_k_reference(logits_TE: ArrayLike, k: int) -> TopK:
    """`top_k` in float64 numpy."""
    logits = np.asarray(logits_TE, np.float64)
    ids = np.argsort(-logits, axis=1, kind="stable")[:, :k].astype(np.int32)
    highest = np.maximum(logits.max(axis=1), np.finfo(np.float64).min)
    with np.errstate(divide="ignore"):
        lse = highest + np.log(np.exp(logits - highest[:, None]).sum(axis=1))
    counts = np.bincount(ids.ravel(), minlength=logits.shape[1]).astype(np.int32)
    return TopK(np.take_along_axis(logits, ids, axis=1), ids, lse, counts)  # type: ignore[arg-type]


def _xla(logits_TE: Array, k: int) -> tuple[Array, ...]:
    values, ids = lax.top_k(logits_TE, k)
    counts = jnp.zeros(logits_TE.shape[1], jnp.int32).at[ids.reshape(-1)].add(1)
    return values, ids, jax.nn.logsumexp(logits_TE, axis=1), counts


def _mosaic(logits_TE: Array, k: int) -> tuple[Array, ...]:
    *by_row, counts = top_k_mosaic(logits_TE, k)
    return *by_row, jnp.sum(counts, axis=0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _top_k(logits_TE: Array, k: int, implementation: str) -> tuple[Array, ...]:
    roads = {name: functools.partial(road, k=k) for name, road in (("mosaic", _mosaic), ("xla", _xla))}
    if implementation != "auto":
        return roads[implementation](logits_TE)
    if 0 in logits_TE.shape or target() is None or reason_against(logits_TE.dtype, logits_TE.shape[1], k):
        return roads["xla"](logits_TE)
    return lax.platform_dependent(logits_TE, default=roads["xla"], cuda=roads["mosaic"])


def _forward(logits_TE: Array, k: int, implementation: str) -> Any:
    values, ids, lse, counts = _top_k(logits_TE, k, implementation)
    return (values, ids, lse, counts), (logits_TE, ids, lse)


def _backward(k: int, implementation: str, saved: tuple[Array, ...], grads: tuple[Array, ...]) -> tuple[Array]:
    """d logits = softmax * d lse, and d values at the ids: by k comparisons a logit, in registers; no scatter."""
    (logits_TE, ids_TK, lse_T), (values_grad_TK, _, lse_grad_T, _) = saved, grads
    grad_TE = jnp.exp(logits_TE - lse_T[:, None]) * lse_grad_T[:, None]
    columns = lax.broadcasted_iota(jnp.int32, logits_TE.shape, 1)
    for n in range(k):
        grad_TE += jnp.where(columns == ids_TK[:, n, None], values_grad_TK[:, n, None], 0)
    return (grad_TE.astype(logits_TE.dtype),)


_top_k.defvjp(_forward, _backward)
