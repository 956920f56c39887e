"""The transport that takes nothing anywhere: every expert is on this device, and rows are sorted by expert."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import PyTree

from moejax.moe.dispatch import Arrivals, Plan, Traffic
from moejax.moe.routes import Routes, sort_routes
from moejax.moe.row_transport import RowTransport


class LocalRoad(NamedTuple):
    routes: Routes
    moved: Array
    top_k: Array  # [K], only its length counts: a shape cannot be data


class Local(RowTransport):
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

    def routes(self, plan: Plan, round: Any) -> tuple[Routes, Array, int]:
        road: LocalRoad = plan.road
        return road.routes, road.moved, road.top_k.shape[0]

    def there(self, rows_ND: PyTree[Array], plan: Plan, round: Any) -> Arrivals:
        return Arrivals(rows_ND, plan.road.routes.counts)

    def back(self, rows_RD: PyTree[Array], plan: Plan, round: Any) -> PyTree[Array]:
        return rows_RD
