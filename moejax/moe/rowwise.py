"""Rowwise transport: each row straight to its final place in the owner's expert-major buffer.

    x_TD --gather by expert--> rows_ND --ragged all-to-all--> rows_RD     (and the same road back)

Olmo-core 3's rowwise layout (`layout.py`), sent in one transfer for each pair of device and expert, so that no
permutation runs after arrival. With granularity `peer` there is one transfer for each device: fewer and longer ones,
and a gather on arrival that puts the sources' runs in expert order.
The exchange is its own mirror: the gradient of dispatch is the return exchange, the gradient of the return is dispatch.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import PyTree

from moejax.config import Granularity, Overflow
from moejax.moe.collectives import Chunks, exclusive_cumsum, move_rows, rearrange_rows
from moejax.moe.dispatch import Arrivals, Plan
from moejax.moe.layout import (
    Layout,
    Window,
    capacity_rows,
    count_rounds,
    most_rows,
    receive_layout,
    traffic,
    window,
)
from moejax.moe.routes import Routes
from moejax.moe.row_transport import RowTransport

# XLA:GPU's one-shot ragged all-to-all crashes above 32 devices (openxla/xla issue 47283, open in 2026-11)
MOST_DEVICES = 32


class RowwiseRoad(NamedTuple):
    layout: Layout
    top_k: Array  # [K], only its length counts


class Rowwise(RowTransport):
    """Experts sharded over the mesh axis `axis_name` of `size` devices; runs inside a manual region over that axis.

    capacity_factor: buffer rows over T K; None: as many rows as can ever arrive. overflow: what happens to more than
    fit.
    """

    name = "rowwise"

    def __init__(
        self,
        axis_name: str,
        size: int,
        capacity_factor: float | None = None,
        overflow: Overflow = Overflow.exact,
        granularity: Granularity = Granularity.expert,
    ):
        self.axis_name, self.size = axis_name, size
        self.capacity_factor, self.overflow, self.granularity = capacity_factor, overflow, granularity

    def buffer_rows(self, tokens: int, top_k: int, n_experts: int) -> int:
        return capacity_rows(tokens, top_k, n_experts, self.size, self.capacity_factor, self.overflow)

    def sent_bytes(self, tokens: int, top_k: int, n_experts: int, width: int, itemsize: int) -> float:
        return 2 * tokens * top_k * width * itemsize * (self.size - 1) / self.size

    def refusal(self, tokens: int, top_k: int, n_experts: int) -> str | None:
        if self.size > MOST_DEVICES:
            return f"XLA's ragged all-to-all serves at most {MOST_DEVICES} devices, not ep={self.size}"
        return too_many_rows(most_rows(tokens, top_k, n_experts, self.size))

    def plan(self, expert_ids_TK: Array, n_experts: int) -> Plan:
        tokens, top_k = expert_ids_TK.shape
        layout = receive_layout(expert_ids_TK, n_experts, self.axis_name, self.size)
        road = RowwiseRoad(layout, jnp.zeros(top_k))
        return plan_rounds(self, layout, road, tokens, top_k, n_experts)

    def routes(self, plan: Plan, round: Any) -> tuple[Routes, Array, int]:
        road, moved = self._moved(plan, round)
        return road.layout.routes, moved.moved, road.top_k.shape[0]

    def there(self, rows_ND: PyTree[Array], plan: Plan, round: Any) -> Arrivals:
        road, moved = self._moved(plan, round)
        send = lambda x: self._there(x, road.layout, moved, self._rows(road))  # noqa: E731
        return Arrivals(jax.tree.map(send, rows_ND), moved.group_sizes(lax.axis_index(self.axis_name)))

    def back(self, rows_RD: PyTree[Array], plan: Plan, round: Any) -> PyTree[Array]:
        road, moved = self._moved(plan, round)
        return jax.tree.map(lambda x: self._back(x, road.layout, moved), rows_RD)

    def _rows(self, road: RowwiseRoad) -> int:
        top_k = road.top_k.shape[0]
        return self.buffer_rows(road.layout.row.shape[0] // top_k, top_k, road.layout.routes.counts.shape[0])

    def _moved(self, plan: Plan, round: Any) -> tuple[RowwiseRoad, Window]:
        road: RowwiseRoad = plan.road
        return road, window(road.layout, round, self._rows(road))

    def _there(self, rows_ND: Array, layout: Layout, moved: Window, n_rows: int) -> Array:
        me, n = lax.axis_index(self.axis_name), rows_ND.shape[0]
        if self.granularity == Granularity.expert:
            return move_rows(rows_ND, expert_chunks(layout, moved, me), n_rows, n, self.axis_name)
        arrived = move_rows(rows_ND, peer_chunks(layout, moved, me), n_rows, n, self.axis_name)
        by_source, size, by_expert = order_on_arrival(moved, me)
        return rearrange_rows(arrived, by_source, size, by_expert, n_rows, n_rows)

    def _back(self, rows_RD: Array, layout: Layout, moved: Window) -> Array:
        me, n, n_rows = lax.axis_index(self.axis_name), layout.row.shape[0], rows_RD.shape[0]
        if self.granularity == Granularity.expert:
            return move_rows(rows_RD, expert_chunks(layout, moved, me).reversed(), n, n_rows, self.axis_name)
        by_source, size, by_expert = order_on_arrival(moved, me)
        leaving = rearrange_rows(rows_RD, by_expert, size, by_source, n_rows, n_rows)
        return move_rows(leaving, peer_chunks(layout, moved, me).reversed(), n, n_rows, self.axis_name)


def plan_rounds(transport: Any, layout: Layout, road: Any, tokens: int, top_k: int, n_experts: int) -> Plan:
    """The plan of a transport whose rounds are windows of the receive layout."""
    buffer, arriving = transport.buffer_rows(tokens, top_k, n_experts), layout.arriving
    fits = buffer >= most_rows(tokens, top_k, n_experts, transport.size)
    certain = fits or transport.overflow == Overflow.drop
    seen = traffic(arriving, lax.axis_index(transport.axis_name), buffer, transport.overflow)
    return Plan(None if certain else count_rounds(arriving, buffer), seen, road)


def too_many_rows(rows: int) -> str | None:
    return f"{rows} rows can arrive on a device, and offsets are 32 bits wide" if rows >= 2**31 else None


def origins(layout: Layout, moved: Window) -> Array:
    """int32[S, D, L]; place of the first moving row of each chunk among the source's sorted routes."""
    sources = layout.counts.shape[0]
    first = exclusive_cumsum(layout.counts.reshape(sources, -1), 1).reshape(layout.counts.shape)
    return first + moved.skipped


def expert_chunks(layout: Layout, moved: Window, me: Array) -> Chunks:
    """One chunk for each pair of source and expert; it lands where the expert reads it."""
    origin_SDL = origins(layout, moved)
    leaving = (jnp.take(x, me, axis=0).reshape(-1) for x in (origin_SDL, moved.sizes, moved.rows))
    arriving = (jnp.take(x, me, axis=1).reshape(-1) for x in (moved.rows, moved.sizes, origin_SDL))
    return Chunks(*leaving, *arriving)


def peer_chunks(layout: Layout, moved: Window, me: Array) -> Chunks:
    """One chunk for each pair of devices, the buffer source-major.

    What of a source moves to one device in one round is one run of its sorted routes: a window cuts off whole experts
    at both ends, and of the two at its edges a head and a tail.
    """
    origin_SD = jnp.min(jnp.where(moved.sizes > 0, origins(layout, moved), jnp.iinfo(jnp.int32).max), axis=2)
    size_SD = moved.sizes.sum(2)
    origin_SD = jnp.where(size_SD > 0, origin_SD, 0)
    there_SD = exclusive_cumsum(size_SD, 0)
    leaving = (jnp.take(x, me, axis=0) for x in (origin_SD, size_SD, there_SD))
    arriving = (jnp.take(x, me, axis=1) for x in (there_SD, size_SD, origin_SD))
    return Chunks(*leaving, *arriving)


def order_on_arrival(moved: Window, me: Array) -> tuple[Array, Array, Array]:
    """(first row source-major, size, first row expert-major) of each chunk on this device, int32[S * L]."""
    size_SL = jnp.take(moved.sizes, me, axis=1)
    by_source = exclusive_cumsum(size_SL.reshape(-1))
    by_expert = jnp.take(moved.rows, me, axis=1).reshape(-1)
    return by_source, size_SL.reshape(-1), by_expert
