"""This device's routes, sorted by expert: how token rows are gathered for them, and summed back to tokens.

    x_TD --take_rows--> rows_ND, by expert --(experts, elsewhere)--> rows_ND --weighted_sum--> y_TD

A route is one (token, k) pair; N = T K of them. Both ends are gathers, forward and backward: no K-fold copy is made
before the gather, and no gradient is a scatter-add. Which rows were `moved` is told by index, never by value: rows that
were not may hold anything.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int

from moejax.moe.losses import count_routes


class Routes(NamedTuple):
    """Routes sorted by expert, ties in (token, k) order.

    route: int32[N]; the route r = t K + k at each sorted place; routes that go nowhere come last.
    place: int32[N]; the sorted place of each route, the inverse of `route`.
    expert: int32[N]; the expert of each sorted place, E for those that go nowhere.
    counts: int32[E]; routes per expert.
    """

    route: Int[Array, "N"]
    place: Int[Array, "N"]
    expert: Int[Array, "N"]
    counts: Int[Array, "E"]


def sort_routes(expert_ids_TK: Int[Array, "T K"], n_experts: int) -> Routes:
    flat_N = expert_ids_TK.reshape(-1)
    route_N = jnp.argsort(flat_N, stable=True).astype(jnp.int32)
    place_N = jnp.zeros_like(route_N).at[route_N].set(jnp.arange(flat_N.shape[0], dtype=jnp.int32), unique_indices=True)
    counts_E = count_routes(expert_ids_TK, n_experts)[0].astype(jnp.int32)
    return Routes(route_N, place_N, jnp.take(flat_N, route_N).astype(jnp.int32), counts_E)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def take_rows(
    rows_TD: Float[Array, "T ..."], routes: Routes, moved_N: Bool[Array, "N"], top_k: int
) -> Float[Array, "N ..."]:
    """The row of each sorted route's token, rows[route // K].

    Its gradient sums the moved rows of each token, gathered through `routes.place`.
    """
    return jnp.take(rows_TD, routes.route // top_k, axis=0)


def _take_rows_forward(rows_TD: Array, routes: Routes, moved_N: Array, top_k: int) -> tuple[Array, Any]:
    return take_rows(rows_TD, routes, moved_N, top_k), (routes, moved_N)


def _take_rows_backward(top_k: int, residuals: Any, grad_ND: Array) -> tuple[Array, None, None]:
    routes, moved_N = residuals
    return sum_by_token(grad_ND, routes, moved_N, top_k).astype(grad_ND.dtype), None, None


take_rows.defvjp(_take_rows_forward, _take_rows_backward)


def sum_by_token(
    rows_ND: Float[Array, "N ..."], routes: Routes, moved_N: Bool[Array, "N"], top_k: int
) -> Float[Array, "T ..."]:
    """fp32; the sum of each token's moved rows: `take_rows` on the way back."""
    return jnp.sum(_rows_by_token(rows_ND, routes, moved_N, top_k), axis=1)


def _rows_by_token(rows_ND: Array, routes: Routes, moved_N: Array, top_k: int) -> Array:
    """fp32[T, K, ...]; zeros where the row of a route was not moved."""
    there_N = jnp.take(moved_N, routes.place).reshape(-1, *[1] * (rows_ND.ndim - 1))
    picked_ND = jnp.where(there_N, jnp.take(rows_ND, routes.place, axis=0), 0)
    return picked_ND.reshape(-1, top_k, *rows_ND.shape[1:]).astype(jnp.float32)


@jax.custom_vjp
def weighted_sum(
    rows_ND: Float[Array, "N D"], weights_TK: Float[Array, "T K"], routes: Routes, moved_N: Bool[Array, "N"]
) -> Float[Array, "T D"]:
    """y_t = sum_k weights_tk * rows[place of (t, k)] over the moved rows, summed and returned in fp32.

    Gradients: rows get weight * grad, the weights <row, grad> in fp32; both by gathers.
    """
    rows_TKD = _rows_by_token(rows_ND, routes, moved_N, weights_TK.shape[1])
    weights_TK = jnp.where(jnp.take(moved_N, routes.place).reshape(weights_TK.shape), weights_TK, 0)
    return jnp.einsum("tkd,tk->td", rows_TKD, weights_TK, preferred_element_type=jnp.float32)


def _weighted_sum_forward(rows_ND: Array, weights_TK: Array, routes: Routes, moved_N: Array) -> tuple[Array, Any]:
    return weighted_sum(rows_ND, weights_TK, routes, moved_N), (rows_ND, weights_TK, routes, moved_N)


def _weighted_sum_backward(residuals: Any, grad_TD: Array) -> tuple[Array, Array, None, None]:
    rows_ND, weights_TK, routes, moved_N = residuals
    grad_ND, grad_weights_TK = weighted_sum_gradients(rows_ND, weights_TK, routes, moved_N, grad_TD)
    return grad_ND, grad_weights_TK, None, None


def weighted_sum_gradients(
    rows_ND: Array, weights_TK: Array, routes: Routes, moved_N: Array, grad_TD: Array
) -> tuple[Array, Array]:
    """The gradients of `weighted_sum` in its rows and in its weights, each in the dtype of what it belongs to."""
    top_k = weights_TK.shape[1]
    weight_N = jnp.take(weights_TK.reshape(-1), routes.route)
    grad_ND = weight_N[:, None] * jnp.take(grad_TD, routes.route // top_k, axis=0)
    grad_ND = jnp.where(moved_N[:, None], grad_ND, 0).astype(rows_ND.dtype)
    rows_TKD = _rows_by_token(rows_ND, routes, moved_N, top_k)
    grad_weights_TK = jnp.einsum("tkd,td->tk", rows_TKD, grad_TD)
    return grad_ND, grad_weights_TK.astype(weights_TK.dtype)


weighted_sum.defvjp(_weighted_sum_forward, _weighted_sum_backward)
