"""Dense all-to-all: a slot of fixed size from every device to every other.

    x_TD --gather by expert--> rows_ND --slots of each peer--> [ep, S, D] --all-to-all--> [ep, S, D] --gather--> rows_RD

One regular collective and no ragged one, whatever the platform; the price is that slots travel full or not, and that a
gather puts the sources' runs in expert order. A slot belongs to a pair of devices and not of device and expert: it
holds ceil(capacity_factor * T K / ep) rows of its peer's experts together, and together they vary far less. In round r
it carries the rows [r S, (r + 1) S) that one device has for another.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Int, PyTree

from moejax.config import Overflow
from moejax.moe.collectives import exclusive_cumsum, rearrange_rows
from moejax.moe.dispatch import Arrivals, Plan
from moejax.moe.layout import count_rounds, traffic
from moejax.moe.routes import Routes, sort_routes
from moejax.moe.row_transport import RowTransport
from moejax.moe.rowwise import too_many_rows


class AllToAllRoad(NamedTuple):
    """counts: int32[S, D, L]; routes of source s to local expert l of device d."""

    routes: Routes
    counts: Int[Array, "S D L"]
    top_k: Array  # [K], only its length counts


class Runs(NamedTuple):
    """What moves in one round.

    Leaving, int32[D]: first sorted place, rows, and first row of its slot.
    Arriving, int32[S * L], by source and expert: first row in the slots, rows, first row expert-major; group sizes
    int32[L].
    """

    leaving: tuple[Array, Array, Array]
    arriving: tuple[Array, Array, Array]
    group_sizes: Array
    moved: Array


class AllToAll(RowTransport):
    """Experts sharded over the mesh axis `axis_name` of `size` devices; runs inside a manual region over that axis."""

    name = "all_to_all"

    def __init__(self, axis_name: str, size: int, capacity_factor: float | None = None):
        self.axis_name, self.size, self.capacity_factor = axis_name, size, capacity_factor

    def slot_rows(self, tokens: int, top_k: int, n_experts: int) -> int:
        most = tokens * min(top_k, n_experts // self.size)
        if self.capacity_factor is None:
            return most
        return min(most, max(1, math.ceil(self.capacity_factor * tokens * top_k / self.size)))

    def buffer_rows(self, tokens: int, top_k: int, n_experts: int) -> int:
        return self.size * self.slot_rows(tokens, top_k, n_experts)

    def sent_bytes(self, tokens: int, top_k: int, n_experts: int, width: int, itemsize: int) -> float:
        return 2 * (self.size - 1) * self.slot_rows(tokens, top_k, n_experts) * width * itemsize

    def refusal(self, tokens: int, top_k: int, n_experts: int) -> str | None:
        return too_many_rows(self.buffer_rows(tokens, top_k, n_experts))

    def plan(self, expert_ids_TK: Array, n_experts: int) -> Plan:
        tokens, top_k = expert_ids_TK.shape
        routes = sort_routes(expert_ids_TK, n_experts)
        counts_SDL = lax.all_gather(routes.counts, self.axis_name).reshape(self.size, self.size, -1)
        slot, me = self.slot_rows(tokens, top_k, n_experts), lax.axis_index(self.axis_name)
        pair_SD = counts_SDL.sum(2)
        # a pair is to its slot what a device is to its buffer elsewhere; past the end is what any source has too much
        # for me
        fullest_D = jnp.max(pair_SD, axis=0)
        seen = traffic(fullest_D, me, slot, Overflow.exact)
        past_D = jnp.sum(jnp.maximum(pair_SD - slot, 0), axis=0)
        seen = seen._replace(overflow=jnp.take(past_D, me).astype(jnp.float32))
        certain = slot >= tokens * min(top_k, n_experts // self.size)
        road = AllToAllRoad(routes, counts_SDL, jnp.zeros(top_k))
        return Plan(None if certain else count_rounds(fullest_D, slot), seen, road)

    def _slot(self, road: AllToAllRoad) -> int:
        top_k = road.top_k.shape[0]
        return self.slot_rows(road.routes.route.shape[0] // top_k, top_k, road.routes.counts.shape[0])

    def _runs(self, road: AllToAllRoad, round: Any) -> Runs:
        slot, me = self._slot(road), lax.axis_index(self.axis_name)
        first = jnp.asarray(round, jnp.int32) * slot
        mine_D = jnp.take(road.counts, me, axis=0).sum(1)
        start_D = exclusive_cumsum(mine_D)
        size_D = jnp.clip(mine_D - first, 0, slot)
        slots = jnp.arange(self.size) * slot
        begin_SL = exclusive_cumsum(jnp.take(road.counts, me, axis=1), 1)  # of each expert's run, among the pair's rows
        end_SL = begin_SL + jnp.take(road.counts, me, axis=1)
        size_SL = jnp.clip(end_SL - first, 0, slot) - jnp.clip(begin_SL - first, 0, slot)
        by_source = slots[:, None] + jnp.clip(begin_SL - first, 0, slot)
        by_expert = exclusive_cumsum(size_SL.T.reshape(-1)).reshape(-1, self.size).T
        place = jnp.arange(road.routes.route.shape[0])
        per_peer = road.counts.shape[2]
        peer = jnp.minimum(road.routes.expert // per_peer, self.size - 1)
        within = place - jnp.take(start_D, peer) - first
        moved = (road.routes.expert < self.size * per_peer) & (within >= 0) & (within < slot)
        arriving = (by_source.reshape(-1), size_SL.reshape(-1), by_expert.reshape(-1))
        return Runs((start_D + first, size_D, slots), arriving, size_SL.sum(0), moved)

    def _swap(self, slots: Array) -> Array:
        return lax.all_to_all(slots, self.axis_name, 0, 0, tiled=True)

    def routes(self, plan: Plan, round: Any) -> tuple[Routes, Array, int]:
        road: AllToAllRoad = plan.road
        return road.routes, self._runs(road, round).moved, road.top_k.shape[0]

    def there(self, rows_ND: PyTree[Array], plan: Plan, round: Any) -> Arrivals:
        road: AllToAllRoad = plan.road
        runs, n = self._runs(road, round), road.routes.route.shape[0]
        n_rows = self.size * self._slot(road)

        def send(x_N: Array) -> Array:
            arrived = self._swap(rearrange_rows(x_N, *runs.leaving, n_rows, n))
            return rearrange_rows(arrived, *runs.arriving, n_rows, n_rows)

        return Arrivals(jax.tree.map(send, rows_ND), runs.group_sizes)

    def back(self, rows_RD: PyTree[Array], plan: Plan, round: Any) -> PyTree[Array]:
        road: AllToAllRoad = plan.road
        runs, n = self._runs(road, round), road.routes.route.shape[0]
        n_rows = self.size * self._slot(road)
        by_source, size, by_expert = runs.arriving
        first, leaving, slots = runs.leaving

        def send(x_R: Array) -> Array:
            returned = self._swap(rearrange_rows(x_R, by_expert, size, by_source, n_rows, n_rows))
            return rearrange_rows(returned, slots, leaving, first, n, n_rows)

        return jax.tree.map(send, rows_RD)
