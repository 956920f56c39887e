"""Rowwise transport: each row straight to its final place in the owner's expert-major buffer.

    x_TD --gather by expert--> rows_ND --ragged all-to-all--> rows_RD     (and the same road back)

The layout is Olmo-core 3's rowwise one: expert-major, then source device, then route order, densely packed, only the tail
unused; so no permutation runs after arrival. One all-gather of the counts lets every device compute every offset by itself:
with n[s, d, l] the routes of source s to local expert l of device d,

    row(s, d, l) = sum_{l' < l} sum_s' n[s', d, l']  +  sum_{s' < s} n[s', d, l]

The exchange is its own mirror: the gradient of dispatch is the return exchange, the gradient of the return is dispatch.
The receive buffer has ep * T * min(K, e) rows, the most that can ever arrive, so no token is dropped.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Int, PyTree

from moejax.moe.collectives import exclusive_cumsum, ragged_all_to_all
from moejax.moe.dispatch import Arrivals, RouteOrder, sort_routes, take_rows, weighted_sum


class Offsets(NamedTuple):
    """Where each chunk of rows lies; a chunk is what one source sends to one expert.

    Seen as sender, int32[E], by expert:     here: first row of the chunk in the sorted rows;  size;
                                             there: its first row in the owner's buffer.
    Seen as owner, int32[ep * e], by (source, local expert): first row in this buffer;  size;
                                             origin: its first row in the source's sorted rows.
    """

    sender_here: Int[Array, "E"]
    sender_size: Int[Array, "E"]
    sender_there: Int[Array, "E"]
    owner_here: Int[Array, "E"]
    owner_size: Int[Array, "E"]
    owner_origin: Int[Array, "E"]


def chunk_offsets(counts_SDL: Int[Array, "S D L"], me: Array) -> Offsets:
    """All offsets from the counts of every source s, destination d and local expert l (module docstring, formula)."""
    arriving_DL = counts_SDL.sum(0)
    row_SDL = exclusive_cumsum(arriving_DL, 1)[None] + exclusive_cumsum(counts_SDL, 0)
    sources = counts_SDL.shape[0]
    origin_SDL = exclusive_cumsum(counts_SDL.reshape(sources, -1), 1).reshape(counts_SDL.shape)

    def of_sender(x_SDL: Array) -> Array:
        return jnp.take(x_SDL, me, axis=0).reshape(-1)

    def of_owner(x_SDL: Array) -> Array:
        return jnp.take(x_SDL, me, axis=1).reshape(-1)

    return Offsets(
        sender_here=of_sender(origin_SDL),
        sender_size=of_sender(counts_SDL),
        sender_there=of_sender(row_SDL),
        owner_here=of_owner(row_SDL),
        owner_size=of_owner(counts_SDL),
        owner_origin=of_owner(origin_SDL),
    )


class RowwiseTicket(NamedTuple):
    order: RouteOrder
    weights: Array
    offsets: Offsets


class Rowwise:
    """Experts sharded over the mesh axis `axis_name` of `size` devices; runs inside a manual region over that axis."""

    name = "rowwise"

    def __init__(self, axis_name: str, size: int):
        self.axis_name, self.size = axis_name, size

    def local_experts(self, n_experts: int) -> int:
        return n_experts // self.size

    def buffer_rows(self, tokens: int, top_k: int, n_experts: int) -> int:
        return self.size * tokens * min(top_k, self.local_experts(n_experts))

    def dispatch(self, rows: PyTree[Array], expert_ids: Array, weights: Array, n_experts: int) -> Arrivals:
        tokens, top_k = expert_ids.shape
        order = sort_routes(expert_ids, n_experts)
        counts_SE = lax.all_gather(order.counts, self.axis_name)
        counts_SDL = counts_SE.reshape(self.size, self.size, self.local_experts(n_experts))
        me = lax.axis_index(self.axis_name)
        offsets = chunk_offsets(counts_SDL, me)
        n_rows = self.buffer_rows(tokens, top_k, n_experts)
        sorted_rows = jax.tree.map(lambda x: take_rows(x, order, jnp.arange(top_k)), rows)
        arrived = jax.tree.map(lambda x: _send(x, offsets, n_rows, self.axis_name), sorted_rows)
        return Arrivals(arrived, jnp.take(counts_SDL, me, axis=1).sum(0), RowwiseTicket(order, weights, offsets))

    def combine(self, expert_rows: Array, ticket: RowwiseTicket) -> Array:
        n_routes = ticket.order.route.shape[0]
        returned = _give_back(expert_rows, ticket.offsets, n_routes, self.axis_name)
        return weighted_sum(returned, ticket.weights, ticket.order)


def _exchange_there(rows: Array, offsets: Offsets, n_rows: int, axis_name: str) -> Array:
    out = jnp.zeros((n_rows, *rows.shape[1:]), rows.dtype)
    o = offsets
    return ragged_all_to_all(rows, out, o.sender_here, o.sender_size, o.sender_there, o.owner_size, axis_name)


def _exchange_back(rows: Array, offsets: Offsets, n_rows: int, axis_name: str) -> Array:
    out = jnp.zeros((n_rows, *rows.shape[1:]), rows.dtype)
    o = offsets
    return ragged_all_to_all(rows, out, o.owner_here, o.owner_size, o.owner_origin, o.sender_size, axis_name)


def _mirrored(forward: Any, backward: Any) -> Any:
    """An exchange whose gradient is the opposite exchange: no scatter-add, and nothing past the sent rows is read."""

    def exchange(rows: Array, offsets: Offsets, n_rows: int, axis_name: str) -> Array:
        return forward(rows, offsets, n_rows, axis_name)

    exchange = jax.custom_vjp(exchange, nondiff_argnums=(2, 3))

    def forward_rule(rows: Array, offsets: Offsets, n_rows: int, axis_name: str) -> tuple[Array, Any]:
        # the row count of the operand travels as the length of an empty array
        return forward(rows, offsets, n_rows, axis_name), (offsets, jnp.zeros((rows.shape[0], 0)))

    def backward_rule(n_rows: int, axis_name: str, residuals: Any, grad: Array) -> tuple[Array, None]:
        offsets, like = residuals
        return backward(grad, offsets, like.shape[0], axis_name), None

    exchange.defvjp(forward_rule, backward_rule)
    return exchange


_send = _mirrored(_exchange_there, _exchange_back)
_give_back = _mirrored(_exchange_back, _exchange_there)
