"""What the transports that move rows have in common: all but the way from the sender's routes to the buffer, and back.

    x_TD --take_rows--> rows_ND --there--> rows_RD          rows_RD --back--> rows_ND --weighted_sum--> y_TD

A transport gives the two in the middle. The other half of this module is the same road for rows in a code (MXFP8): what
travels is integers, so that the gradient is no derivative of it but a road of its own, called by who wrote the recipe
(`mx_experts.py`).
"""

from abc import ABC, abstractmethod
from typing import Any

import jax
from jax import Array
from jaxtyping import Float, Int, PyTree

from moejax.moe.dispatch import Arrivals, Code, Plan
from moejax.moe.routes import Routes, sum_by_token, take_rows, weighted_sum, weighted_sum_gradients


class RowTransport(ABC):
    """The contract of `dispatch.Transport`, but for plan and limits, from three methods."""

    @abstractmethod
    def routes(self, plan: Plan, round: Any) -> tuple[Routes, Array, int]:
        """This device's sorted routes, which of them move in this round (bool[N]), and K."""

    @abstractmethod
    def there(self, rows_ND: PyTree[Array], plan: Plan, round: Any) -> Arrivals:
        """Rows of the sorted routes to where the experts read them."""

    @abstractmethod
    def back(self, rows_RD: PyTree[Array], plan: Plan, round: Any) -> PyTree[Array]:
        """And back to the sorted routes; rows of routes that did not move are undefined."""

    def dispatch(self, rows: PyTree[Float[Array, "T ..."]], plan: Plan, round: Int[Array, ""] | int) -> Arrivals:
        routes, moved, top_k = self.routes(plan, round)
        return self.there(jax.tree.map(lambda x: take_rows(x, routes, moved, top_k), rows), plan, round)

    def combine(
        self, expert_rows_RD: Float[Array, "R D"], weights_TK: Float[Array, "T K"], plan: Plan, round: Any
    ) -> Float[Array, "T D"]:
        routes, moved, _ = self.routes(plan, round)
        return weighted_sum(self.back(expert_rows_RD, plan, round), weights_TK, routes, moved)

    # --- rows in a code --------------------------------------------------------------------------------------------

    def combine_coded(
        self, rows_RD: Array, weights_TK: Array, plan: Plan, round: Any, code: Code
    ) -> tuple[Float[Array, "T D"], PyTree[Array]]:
        """(y in fp32, what the gradients need of it)."""
        routes, moved, _ = self.routes(plan, round)
        came_back = self.back(code.encode(rows_RD), plan, round)
        return weighted_sum(code.decode(came_back), weights_TK, routes, moved), came_back

    def combine_coded_gradients(
        self, kept: PyTree[Array], weights_TK: Array, grad_TD: Array, plan: Plan, round: Any, code: Code
    ) -> tuple[PyTree[Array], Array]:
        """(gradient of the rows [R, ...], in the code, and of the weights [T, K])."""
        routes, moved, _ = self.routes(plan, round)
        grad_ND, grad_weights = weighted_sum_gradients(code.decode(kept), weights_TK, routes, moved, grad_TD)
        return self.there(code.encode(grad_ND), plan, round).rows, grad_weights

    def dispatch_coded_gradient(self, grad_RD: Array, plan: Plan, round: Any, code: Code) -> Float[Array, "T D"]:
        """fp32: the gradient of the rows that were dispatched."""
        routes, moved, top_k = self.routes(plan, round)
        came_back = self.back(code.encode(grad_RD), plan, round)
        return sum_by_token(code.decode(came_back), routes, moved, top_k)
