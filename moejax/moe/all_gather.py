"""All-gather transport: every token to every device, each keeps the rows of its own experts, a reduce-scatter brings
sums back.

    x_TD --all-gather--> x of all devices --gather own rows--> rows_RD --experts, * weight--> rows_RD --sum by token,
    reduce-scatter--> y_TD

The robust road: two collectives that every platform has, and no offsets to agree on. It moves ep/K times what `rowwise`
moves, and holds the tokens of all devices at once. The rows stand in the same receive layout (`layout.py`), so
capacity, rounds and drops are the same, row for row.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Int, PyTree

from moejax.config import Overflow
from moejax.moe.dispatch import Arrivals, Code, Plan
from moejax.moe.layout import Layout, capacity_rows, receive_layout, window
from moejax.moe.rowwise import plan_rounds, too_many_rows

# Rows of all devices that one device may have to hold at once
MOST_TOKENS = 2**20


class AllGatherRoad(NamedTuple):
    """route: int32[ep N]; the routes of all devices (device N + t K + k) in the order of this device's buffer without
    end; only the first `arriving` are its own. place: int32[ep N]; the inverse. top_k: [K], only its length counts.
    """

    layout: Layout
    route: Int[Array, "ep N"]
    place: Int[Array, "ep N"]
    top_k: Array


class Seats(NamedTuple):
    """The window of one round. route: int32[R]; there: bool[R], False past the last row. seat: int32[ep N]; -1 without
    one."""

    route: Int[Array, "R"]
    there: Array
    seat: Int[Array, "ep N"]


class AllGather:
    """Experts sharded over the mesh axis `axis_name` of `size` devices; runs inside a manual region over that axis."""

    name = "all_gather"

    def __init__(
        self, axis_name: str, size: int, capacity_factor: float | None = None, overflow: Overflow = Overflow.exact
    ):
        self.axis_name, self.size = axis_name, size
        self.capacity_factor, self.overflow = capacity_factor, overflow

    def buffer_rows(self, tokens: int, top_k: int, n_experts: int) -> int:
        return capacity_rows(tokens, top_k, n_experts, self.size, self.capacity_factor, self.overflow)

    def sent_bytes(self, tokens: int, top_k: int, n_experts: int, width: int, itemsize: int) -> float:
        # the sums come back in fp32, or in MXFP8 if that is how rows travel
        return (self.size - 1) * tokens * width * (itemsize + (4 if itemsize > 1 else 1))

    def refusal(self, tokens: int, top_k: int, n_experts: int) -> str | None:
        if self.size * tokens > MOST_TOKENS:
            return f"every device would hold all {self.size * tokens} tokens of the group, more than {MOST_TOKENS}"
        return too_many_rows(self.size * tokens * top_k)

    def plan(self, expert_ids_TK: Array, n_experts: int) -> Plan:
        tokens, top_k = expert_ids_TK.shape
        layout = receive_layout(expert_ids_TK, n_experts, self.axis_name, self.size)
        per_device = n_experts // self.size
        ids_A = lax.all_gather(expert_ids_TK, self.axis_name).reshape(-1)
        local_A = ids_A - lax.axis_index(self.axis_name) * per_device
        key_A = jnp.where((local_A >= 0) & (local_A < per_device), local_A, per_device)
        route_A = jnp.argsort(key_A, stable=True).astype(jnp.int32)
        place_A = (
            jnp.zeros_like(route_A).at[route_A].set(jnp.arange(route_A.shape[0], dtype=jnp.int32), unique_indices=True)
        )
        road = AllGatherRoad(layout, route_A, place_A, jnp.zeros(top_k))
        return plan_rounds(self, layout, road, tokens, top_k, n_experts)

    def _seats(self, road: AllGatherRoad, round: Any) -> tuple[Seats, Array]:
        top_k = road.top_k.shape[0]
        buffer = self.buffer_rows(road.layout.row.shape[0] // top_k, top_k, road.layout.routes.counts.shape[0])
        me = lax.axis_index(self.axis_name)
        moved = window(road.layout, round, buffer)
        row_R = moved.first + jnp.arange(buffer)
        there_R = row_R < jnp.take(road.layout.arriving, me)
        route_R = jnp.take(road.route, row_R, mode="clip")
        seat_A = road.place - moved.first
        mine_A = (road.place < jnp.take(road.layout.arriving, me)) & (seat_A >= 0) & (seat_A < buffer)
        return Seats(route_R, there_R, jnp.where(mine_A, seat_A, -1)), moved.group_sizes(me)

    def dispatch(self, rows: PyTree[Array], plan: Plan, round: Any) -> Arrivals:
        road: AllGatherRoad = plan.road
        seats, group_sizes = self._seats(road, round)
        spread = lambda x: _spread(x, seats, road.top_k.shape[0], self.axis_name)  # noqa: E731
        return Arrivals(jax.tree.map(spread, rows), group_sizes)

    def combine(self, expert_rows_RD: Array, weights_TK: Array, plan: Plan, round: Any) -> Array:
        road: AllGatherRoad = plan.road
        seats, _ = self._seats(road, round)
        weight_R = _spread(weights_TK.reshape(-1), seats, 1, self.axis_name)
        rows_RD = jnp.where(seats.there[:, None], expert_rows_RD.astype(jnp.float32), 0) * weight_R[:, None]
        return _collect(rows_RD, seats, road.top_k.shape[0], self.axis_name)

    # Sums do not travel in a code, so what comes back is the sum of a token's rows on each device, coded and summed on
    # arrival; and the gradient that is spread is coded before it meets a weight, and once more after.

    def combine_coded(
        self, rows_RD: Array, weights_TK: Array, plan: Plan, round: Any, code: Code
    ) -> tuple[Array, PyTree[Array]]:
        road: AllGatherRoad = plan.road
        seats, _ = self._seats(road, round)
        weight_R = _spread_rows(weights_TK.reshape(-1), seats, 1, self.axis_name)
        weighted_RD = jnp.where(seats.there[:, None], rows_RD.astype(jnp.float32), 0) * weight_R[:, None]
        return self._coded_sum(weighted_RD, seats, road.top_k.shape[0], code), code.encode(rows_RD)

    def combine_coded_gradients(
        self, kept: PyTree[Array], weights_TK: Array, grad_TD: Array, plan: Plan, round: Any, code: Code
    ) -> tuple[PyTree[Array], Array]:
        road: AllGatherRoad = plan.road
        seats, _ = self._seats(road, round)
        spread = lambda x: _spread_rows(x, seats, road.top_k.shape[0], self.axis_name)  # noqa: E731
        grad_RD = code.decode(jax.tree.map(spread, code.encode(grad_TD.astype(jnp.float32))))
        grad_RD = jnp.where(seats.there[:, None], grad_RD, 0)
        weight_R = _spread_rows(weights_TK.reshape(-1), seats, 1, self.axis_name)
        rows_RD = jnp.where(seats.there[:, None], code.decode(kept), 0)
        grad_weights = _collect_rows(jnp.sum(rows_RD * grad_RD, axis=-1), seats, 1, self.axis_name)
        return code.encode(grad_RD * weight_R[:, None]), grad_weights.reshape(weights_TK.shape).astype(weights_TK.dtype)

    def dispatch_coded_gradient(self, grad_RD: Array, plan: Plan, round: Any, code: Code) -> Array:
        road: AllGatherRoad = plan.road
        seats, _ = self._seats(road, round)
        return self._coded_sum(grad_RD, seats, road.top_k.shape[0], code)

    def _coded_sum(self, rows_RD: Array, seats: Seats, per: int, code: Code) -> Array:
        mine_AD = code.encode(_sum_by_row(rows_RD, seats, per))  # of all devices' tokens, this device's part
        swap = lambda x: lax.all_to_all(x, self.axis_name, 0, 0, tiled=True)  # noqa: E731
        parts_AD = code.decode(jax.tree.map(swap, mine_AD))
        return jnp.sum(parts_AD.reshape(self.size, -1, parts_AD.shape[-1]), axis=0)


def _spread_rows(x_T: Array, seats: Seats, per: int, axis_name: str) -> Array:
    """The rows of this device's seats out of all devices' [T, ...], `per` routes to a row; zeros where nobody sits."""
    everything = lax.all_gather(x_T, axis_name, tiled=True)
    there_R = seats.there.reshape(-1, *[1] * (x_T.ndim - 1))
    return jnp.where(there_R, jnp.take(everything, seats.route // per, axis=0), 0)


def _collect_rows(rows_R: Array, seats: Seats, per: int, axis_name: str) -> Array:
    """Its transpose: the sum of a row's routes over all devices, back where the row came from; summed in fp32."""
    return lax.psum_scatter(_sum_by_row(rows_R, seats, per), axis_name, tiled=True).astype(rows_R.dtype)


def _sum_by_row(rows_R: Array, seats: Seats, per: int) -> Array:
    """fp32; of each row of all devices, the sum of its routes that sit here."""
    seat_AK = seats.seat.reshape(-1, per)

    def of_route(k: int) -> Array:
        seat_A = seat_AK[:, k]
        there_A = (seat_A >= 0).reshape(-1, *[1] * (rows_R.ndim - 1))
        return jnp.where(there_A, jnp.take(rows_R, jnp.maximum(seat_A, 0), axis=0), 0).astype(jnp.float32)

    return functools.reduce(lambda sum, k: sum + of_route(k), range(1, per), of_route(0))


_spread = jax.custom_vjp(_spread_rows, nondiff_argnums=(2, 3))
_collect = jax.custom_vjp(_collect_rows, nondiff_argnums=(2, 3))
_spread.defvjp(
    lambda x, seats, *static: (_spread_rows(x, seats, *static), seats),
    lambda per, axis_name, seats, grad: (_collect_rows(grad, seats, per, axis_name), None),
)
_collect.defvjp(
    lambda rows, seats, *static: (_collect_rows(rows, seats, *static), seats),
    lambda per, axis_name, seats, grad: (_spread_rows(grad, seats, per, axis_name), None),
)
