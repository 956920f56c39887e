"""Dispatch and combine: how token rows reach their experts and come back.

    x_TD --dispatch--> rows_RD, group_sizes_e --experts--> rows_RD --combine--> y_TD

A transport owns the road between the two; this module owns the contract, so that the layer never knows which road was
taken, and the road that takes nothing anywhere (`Local`). Letters: T tokens here, K experts per token, R buffer rows,
E experts in all, e experts here, D width.
"""

from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int, PyTree

from moejax.moe.losses import count_routes


class Arrivals(NamedTuple):
    """Rows standing in front of this device's experts, expert-major.

    rows: pytree of [R, ...]; only the first sum(group_sizes) rows exist, the rest is undefined and never read.
    group_sizes: int32[e]; rows per local expert, zeros allowed.
    ticket: what the transport needs to find the way back. Opaque to everyone else.
    """

    rows: PyTree[Array]
    group_sizes: Int[Array, "e"]
    ticket: PyTree[Array]


class Transport(Protocol):
    """The contract. A transport is a small immutable object made once per program; both methods are pure.

    `combine(dispatch(x).rows)` with unit weights and K=1 is the identity; in general
    y_t = sum_k weights_tk * expert_{ids_tk}(x_t), for every token t whose ids are in [0, E); routes with id E go nowhere
    and add nothing. Both methods have exact gradients, for the rows and for the weights.
    """

    name: str

    def local_experts(self, n_experts: int) -> int:
        """How many of E experts this device owns; expert i lives on device i // e."""
        ...

    def buffer_rows(self, tokens: int, top_k: int, n_experts: int) -> int:
        """R, rows of the receive buffer for T tokens on each device."""
        ...

    def dispatch(
        self,
        rows: PyTree[Float[Array, "T ..."]],
        expert_ids: Int[Array, "T K"],
        weights: Float[Array, "T K"],
        n_experts: int,
    ) -> Arrivals: ...

    def combine(self, expert_rows: Float[Array, "R D"], ticket: PyTree[Array]) -> Float[Array, "T D"]: ...


class RouteOrder(NamedTuple):
    """This device's routes sorted by expert, ties in (token, k) order.

    route: int32[N], N = T K; the route r = t K + k at each sorted place; routes that go nowhere come last.
    place: int32[N]; the sorted place of each route, the inverse of `route`.
    counts: int32[E]; routes per expert.
    """

    route: Int[Array, "N"]
    place: Int[Array, "N"]
    counts: Int[Array, "E"]


def sort_routes(expert_ids: Int[Array, "T K"], n_experts: int) -> RouteOrder:
    flat_N = expert_ids.reshape(-1)
    route_N = jnp.argsort(flat_N, stable=True).astype(jnp.int32)
    place_N = jnp.zeros_like(route_N).at[route_N].set(jnp.arange(flat_N.shape[0], dtype=jnp.int32), unique_indices=True)
    counts_E = count_routes(expert_ids, n_experts)[0].astype(jnp.int32)
    return RouteOrder(route_N, place_N, counts_E)


@jax.custom_vjp
def take_rows(rows_TD: Float[Array, "T ..."], order: RouteOrder, top_k: Array) -> Float[Array, "N ..."]:
    """Row of the token of each sorted route, rows[route // K]: no K-fold copy is made before the gather.

    Its gradient sums the K rows of a token by a gather through `order.place`: no scatter-add.
    top_k: int32[K], only its length counts (a shape cannot be traced through a custom VJP otherwise).
    """
    return jnp.take(rows_TD, order.route // top_k.shape[0], axis=0)


def _take_rows_forward(rows: Array, order: RouteOrder, top_k: Array) -> tuple[Array, Any]:
    return take_rows(rows, order, top_k), (order, top_k)


def _take_rows_backward(residuals: Any, grad_ND: Array) -> tuple[Array, None, None]:
    order, top_k = residuals
    return sum_routes(grad_ND, order, top_k.shape[0]).astype(grad_ND.dtype), None, None


take_rows.defvjp(_take_rows_forward, _take_rows_backward)


def exists(order: RouteOrder) -> Array:
    """bool[N], by sorted place: False for the routes that go nowhere, whose rows hold whatever lay there."""
    return jnp.arange(order.route.shape[0]) < jnp.sum(order.counts)


def sum_routes(rows_ND: Float[Array, "N D"], order: RouteOrder, top_k: int) -> Float[Array, "T D"]:
    """fp32 sum over k of the sorted rows of each token; routes that go nowhere add nothing, whatever their row holds."""
    there_N = jnp.take(exists(order), order.place)
    picked_ND = jnp.where(there_N[:, None], jnp.take(rows_ND, order.place, axis=0), 0)
    return jnp.sum(picked_ND.reshape(-1, top_k, rows_ND.shape[-1]).astype(jnp.float32), axis=1)


@jax.custom_vjp
def weighted_sum(rows_ND: Float[Array, "N D"], weights_TK: Float[Array, "T K"], order: RouteOrder) -> Float[Array, "T D"]:
    """y_t = sum_k weights_tk * rows[place of (t, k)], summed in fp32, in the dtype of the rows.

    Gradients: rows get weight * grad, the weights <row, grad> in fp32; both by gathers.
    """
    rows_TKD = _rows_by_token(rows_ND, weights_TK.shape[1], order)
    return jnp.einsum("tkd,tk->td", rows_TKD, weights_TK, preferred_element_type=jnp.float32).astype(rows_ND.dtype)


def _rows_by_token(rows_ND: Array, top_k: int, order: RouteOrder) -> Array:
    there_N = jnp.take(exists(order), order.place)
    picked_ND = jnp.where(there_N[:, None], jnp.take(rows_ND, order.place, axis=0), 0)
    return picked_ND.reshape(-1, top_k, rows_ND.shape[-1]).astype(jnp.float32)


def _weighted_sum_forward(rows_ND: Array, weights_TK: Array, order: RouteOrder) -> tuple[Array, Any]:
    return weighted_sum(rows_ND, weights_TK, order), (rows_ND, weights_TK, order)


def _weighted_sum_backward(residuals: Any, grad_TD: Array) -> tuple[Array, Array, None]:
    rows_ND, weights_TK, order = residuals
    top_k = weights_TK.shape[1]
    weight_N = jnp.take(weights_TK.reshape(-1), order.route)
    grad_ND = weight_N[:, None] * jnp.take(grad_TD, order.route // top_k, axis=0).astype(jnp.float32)
    grad_ND = jnp.where(exists(order)[:, None], grad_ND, 0).astype(rows_ND.dtype)
    rows_TKD = _rows_by_token(rows_ND, top_k, order)
    grad_weights_TK = jnp.einsum("tkd,td->tk", rows_TKD, grad_TD.astype(jnp.float32))
    return grad_ND, grad_weights_TK.astype(weights_TK.dtype), None


weighted_sum.defvjp(_weighted_sum_forward, _weighted_sum_backward)


class LocalTicket(NamedTuple):
    order: RouteOrder
    weights: Float[Array, "T K"]


class Local:
    """Every expert is here (ep=1): sort by expert, gather, and back. R = T K, so nothing can overflow."""

    name = "local"

    def local_experts(self, n_experts: int) -> int:
        return n_experts

    def buffer_rows(self, tokens: int, top_k: int, n_experts: int) -> int:
        return tokens * top_k

    def dispatch(self, rows: PyTree[Array], expert_ids: Array, weights: Array, n_experts: int) -> Arrivals:
        order = sort_routes(expert_ids, n_experts)
        top_k = jnp.arange(expert_ids.shape[1])
        sorted_rows = jax.tree.map(lambda x: take_rows(x, order, top_k), rows)
        return Arrivals(sorted_rows, order.counts, LocalTicket(order, weights))

    def combine(self, expert_rows: Array, ticket: LocalTicket) -> Array:
        return weighted_sum(expert_rows, ticket.weights, ticket.order)
