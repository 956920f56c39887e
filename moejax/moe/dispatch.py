"""Dispatch and combine: how token rows reach their experts and come back.

    ids_TK --plan--> Plan        integers only: where every row goes, in how many rounds
    x_TD --dispatch(round)--> rows_RD, group_sizes_e --experts--> rows_RD --combine(round)--> y_TD    summed over rounds

A transport owns the road between dispatch and combine; this module owns the contract, so that the layer never knows
which road was taken, and the road that takes nothing anywhere (`Local`). The rounds are run by
`exchange.through_experts`.
Letters: T tokens here, K experts per token, N = T K routes, R buffer rows, E experts in all, e experts here, D width.
"""

from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int, PyTree

from moejax.moe.routes import Routes, sort_routes, take_rows, weighted_sum


class Arrivals(NamedTuple):
    """Rows standing in front of this device's experts, expert-major.

    rows: pytree of [R, ...]; only the first sum(group_sizes) rows exist, the rest is undefined and never read.
    group_sizes: int32[e]; rows per local expert, zeros allowed.
    """

    rows: PyTree[Array]
    group_sizes: Int[Array, "e"]


class Traffic(NamedTuple):
    """What one exchange did to this device's buffer; fp32 scalars.

    occupancy: rows for the fullest device of the group, over buffer rows; above 1 it overflowed. The same on all of
    them.
    overflow: rows for this device past its buffer's end. dropped: those of them that no expert saw.
    rounds: times the buffers were filled; the same on all devices of the group.
    """

    occupancy: Float[Array, ""]
    overflow: Float[Array, ""]
    dropped: Float[Array, ""]
    rounds: Float[Array, ""]


class Plan(NamedTuple):
    """Where the rows of one batch go.

    rounds: int32, agreed by all devices of the group; None if one round is certain, and nothing for more is compiled.
    traffic: see there. road: what the transport needs to find the way. Opaque to everyone else.
    """

    rounds: Int[Array, ""] | None
    traffic: Traffic
    road: Any


class Transport(Protocol):
    """The contract. A transport is a small immutable object made once per program; its methods are pure.

    Over all rounds, y_t = sum_k weights_tk * expert_{ids_tk}(x_t) for every token t; ids outside [0, E) go nowhere and
    add nothing, and so do the routes that policy `drop` leaves out. `dispatch` and `combine` are linear in rows and in
    weights, with exact gradients; the gradient of one is the road of the other.
    """

    name: str

    def buffer_rows(self, tokens: int, top_k: int, n_experts: int) -> int:
        """R, rows of the receive buffer for T tokens on each device."""
        ...

    def sent_bytes(self, tokens: int, top_k: int, n_experts: int, width: int, itemsize: int) -> float:
        """Bytes that leave a device for one dispatch and one combine of rows [D = width], at balance and one round."""
        ...

    def refusal(self, tokens: int, top_k: int, n_experts: int) -> str | None:
        """Why this transport cannot carry such a layer, in one clause; None if it can."""
        ...

    def plan(self, expert_ids_TK: Int[Array, "T K"], n_experts: int) -> Plan:
        """Expert i lives on device i // e of the group."""
        ...

    def dispatch(self, rows: PyTree[Float[Array, "T ..."]], plan: Plan, round: Int[Array, ""] | int) -> Arrivals: ...

    def combine(
        self,
        expert_rows_RD: Float[Array, "R D"],
        weights_TK: Float[Array, "T K"],
        plan: Plan,
        round: Int[Array, ""] | int,
    ) -> Float[Array, "T D"]:
        """fp32: this round's part of y."""
        ...


class LocalRoad(NamedTuple):
    routes: Routes
    moved: Array
    top_k: Array  # [K], only its length counts: a shape cannot be data


class Local:
    """Every expert is here (ep=1): sort by expert, gather, and back. R = N, so nothing can overflow."""

    name = "local"

    def buffer_rows(self, tokens: int, top_k: int, n_experts: int) -> int:
        return tokens * top_k

    def sent_bytes(self, tokens: int, top_k: int, n_experts: int, width: int, itemsize: int) -> float:
        return 0.0

    def refusal(self, tokens: int, top_k: int, n_experts: int) -> str | None:
        return None

    def plan(self, expert_ids_TK: Array, n_experts: int) -> Plan:
        routes = sort_routes(expert_ids_TK, n_experts)
        rows = jnp.sum(routes.counts)
        moved_N = jnp.arange(routes.route.shape[0]) < rows
        zero = jnp.zeros((), jnp.float32)
        traffic = Traffic(rows.astype(jnp.float32) / expert_ids_TK.size, zero, zero, zero + 1)
        return Plan(None, traffic, LocalRoad(routes, moved_N, jnp.zeros(expert_ids_TK.shape[1])))

    def dispatch(self, rows: PyTree[Array], plan: Plan, round: Any) -> Arrivals:
        road: LocalRoad = plan.road
        take = lambda x: take_rows(x, road.routes, road.moved, road.top_k.shape[0])  # noqa: E731
        return Arrivals(jax.tree.map(take, rows), road.routes.counts)

    def combine(self, expert_rows_RD: Array, weights_TK: Array, plan: Plan, round: Any) -> Array:
        return weighted_sum(expert_rows_RD, weights_TK, plan.road.routes, plan.road.moved)
