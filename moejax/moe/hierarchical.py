"""Hierarchical transport, for experts that span nodes: inside the node first, then across.

    x_TD --gather by expert--> rows_ND --ragged exchange in the node--> relay rows --ragged exchange across--> rows_RD

With device (a, i) the i-th of node a, a row for device (b, j) goes to (a, j) over the fast link, and from there to (b,
j): a device talks to the others of its node and to those of its rank in other nodes, never to all. The relay holds its
rows by (destination node, expert, source), which makes what goes to one expert one run on both sides, since sources of
a node are neighbours in the receive layout: the second hop lands in the final place, and no permutation runs at either
stop.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Int, PyTree

from moejax.config import Overflow
from moejax.moe.collectives import Chunks, Groups, exclusive_cumsum, move_rows
from moejax.moe.dispatch import Arrivals, Plan
from moejax.moe.layout import Layout, Window, capacity_rows, receive_layout, window
from moejax.moe.routes import Routes
from moejax.moe.row_transport import RowTransport
from moejax.moe.rowwise import MOST_DEVICES, origins, plan_rounds, too_many_rows


class HierarchicalRoad(NamedTuple):
    layout: Layout
    top_k: Array  # [K], only its length counts


class Hops(NamedTuple):
    """The two exchanges of one round, and what moves in it."""

    inside: Chunks
    across: Chunks
    moved: Window
    buffer: int
    relay: int


class Hierarchical(RowTransport):
    """Experts over the mesh axis `axis_name` of `size` devices, `per_node` consecutive ones on each node."""

    name = "hierarchical"

    def __init__(
        self,
        axis_name: str,
        size: int,
        per_node: int,
        capacity_factor: float | None = None,
        overflow: Overflow = Overflow.exact,
    ):
        self.axis_name, self.size, self.per_node = axis_name, size, per_node
        self.nodes = max(1, size // per_node)
        self.capacity_factor, self.overflow = capacity_factor, overflow

    @property
    def inside(self) -> Groups:
        return tuple(tuple(range(a * self.per_node, (a + 1) * self.per_node)) for a in range(self.nodes))

    @property
    def across(self) -> Groups:
        return tuple(tuple(range(j, self.size, self.per_node)) for j in range(self.per_node))

    def buffer_rows(self, tokens: int, top_k: int, n_experts: int) -> int:
        return capacity_rows(tokens, top_k, n_experts, self.size, self.capacity_factor, self.overflow)

    def relay_rows(self, tokens: int, top_k: int, n_experts: int) -> int:
        """The most that can pass: what its node's devices have, or what the devices of its rank can take in one
        round."""
        return min(self.per_node * tokens * top_k, self.nodes * self.buffer_rows(tokens, top_k, n_experts))

    def sent_bytes(self, tokens: int, top_k: int, n_experts: int, width: int, itemsize: int) -> float:
        hops = sum((n - 1) / n for n in (self.per_node, self.nodes))
        return 2 * tokens * top_k * width * itemsize * hops

    def refusal(self, tokens: int, top_k: int, n_experts: int) -> str | None:
        if self.size % self.per_node or self.nodes < 2:
            return (
                f"parallel.experts.devices_per_node={self.per_node} does not cut ep={self.size} "
                "into two or more whole nodes"
            )
        if max(self.per_node, self.nodes) > MOST_DEVICES:
            hops = f"{self.nodes} nodes of {self.per_node}"
            return f"XLA's ragged all-to-all serves at most {MOST_DEVICES} devices a hop, not {hops}"
        return too_many_rows(self.relay_rows(tokens, top_k, n_experts))

    def plan(self, expert_ids_TK: Array, n_experts: int) -> Plan:
        tokens, top_k = expert_ids_TK.shape
        layout = receive_layout(expert_ids_TK, n_experts, self.axis_name, self.size)
        return plan_rounds(self, layout, HierarchicalRoad(layout, jnp.zeros(top_k)), tokens, top_k, n_experts)

    def _hops(self, road: HierarchicalRoad, round: Any) -> Hops:
        top_k = road.top_k.shape[0]
        shape = (road.layout.row.shape[0] // top_k, top_k, road.layout.routes.counts.shape[0])
        buffer = self.buffer_rows(*shape)
        moved = window(road.layout, round, buffer)
        me = lax.axis_index(self.axis_name)
        inside, across = hop_chunks(road.layout, moved, me // self.per_node, me % self.per_node, self.nodes)
        return Hops(inside, across, moved, buffer, self.relay_rows(*shape))

    def routes(self, plan: Plan, round: Any) -> tuple[Routes, Array, int]:
        road: HierarchicalRoad = plan.road
        return road.layout.routes, self._hops(road, round).moved.moved, road.top_k.shape[0]

    def there(self, rows_ND: PyTree[Array], plan: Plan, round: Any) -> Arrivals:
        road: HierarchicalRoad = plan.road
        hops, n = self._hops(road, round), road.layout.row.shape[0]

        def send(x_N: Array) -> Array:
            relay = move_rows(x_N, hops.inside, hops.relay, n, self.axis_name, self.inside)
            return move_rows(relay, hops.across, hops.buffer, hops.relay, self.axis_name, self.across)

        return Arrivals(jax.tree.map(send, rows_ND), hops.moved.group_sizes(lax.axis_index(self.axis_name)))

    def back(self, rows_RD: PyTree[Array], plan: Plan, round: Any) -> PyTree[Array]:
        road: HierarchicalRoad = plan.road
        hops, n = self._hops(road, round), road.layout.row.shape[0]

        def send(x_R: Array) -> Array:
            relay = move_rows(x_R, hops.across.reversed(), hops.relay, hops.buffer, self.axis_name, self.across)
            return move_rows(relay, hops.inside.reversed(), n, hops.relay, self.axis_name, self.inside)

        return jax.tree.map(send, rows_RD)


def hop_chunks(
    layout: Layout, moved: Window, a: Int[Array, ""], i: Int[Array, ""], nodes: int
) -> tuple[Chunks, Chunks]:
    """The chunks of both hops as device (a, i) sees them; indices below: nodes a, b, ranks i, j, local expert l."""
    sources, _, local = moved.sizes.shape
    grid = (nodes, sources // nodes, nodes, sources // nodes, local)  # [a, i, b, j, l]
    size, origin, row = (x.reshape(grid) for x in (moved.sizes, origins(layout, moved), moved.rows))
    # relay of (a, j): rows by (b, l, i); [a, j, b, l, i]
    passing = size.transpose(0, 3, 2, 4, 1)
    flat = passing.reshape(*passing.shape[:2], -1)
    stop = exclusive_cumsum(flat, 2).reshape(passing.shape)

    mine = [jnp.take(x, a, axis=0) for x in (size, origin)]  # [i, b, j, l]
    stop_a = jnp.take(stop, a, axis=0)  # [j, b, l, i]
    leaving_size, leaving_origin = (jnp.take(x, i, axis=0).transpose(1, 0, 2) for x in mine)  # [j, b, l]
    leaving = (leaving_origin, leaving_size, jnp.take(stop_a, i, axis=3))
    passing_size, passing_origin = (jnp.take(x, i, axis=2) for x in mine)  # for me as relay, j = i: [i, b, l]
    stop_here = jnp.take(stop_a, i, axis=0)  # [b, l, i]
    arriving = (stop_here.transpose(2, 0, 1), passing_size, passing_origin)
    inside = Chunks(*(x.reshape(-1) for x in (*leaving, *arriving)))

    # one run for each (b, l): all sources of a node, the first row that any of them has
    size_a = size.sum(1)  # [a, b, j, l]
    first = jnp.min(jnp.where(size > 0, row, jnp.iinfo(jnp.int32).max), axis=1)
    first = jnp.where(size_a > 0, first, 0)
    stop_first = stop[..., 0]  # [a, j, b, l]
    of_rank = [jnp.take(x, i, axis=2) for x in (size_a, first)]  # [a, b, l]
    stop_of_rank = jnp.take(stop_first, i, axis=1)  # [a, b, l]
    run_size, run_first = (jnp.take(x, a, axis=0) for x in of_rank)  # [b, l]
    here_size, here_first, here_origin = (
        jnp.take(x, a, axis=1) for x in (*of_rank, stop_of_rank)
    )  # by source node [a, l]
    runs = (jnp.take(stop_of_rank, a, axis=0), run_size, run_first, here_first, here_size, here_origin)
    return inside, Chunks(*(x.reshape(-1) for x in runs))
