"""Dispatch and combine: how token rows reach their experts and come back.

    ids_TK --plan--> Plan        integers only: where every row goes, in how many rounds
    x_TD --dispatch(round)--> rows_RD, group_sizes_e --experts--> rows_RD --combine(round)--> y_TD    summed over rounds

A transport owns the road between dispatch and combine; this module owns the contract, so that the layer never knows
which road was taken. The rounds are run by `exchange.through_experts`.
Letters: T tokens here, K experts per token, N = T K routes, R buffer rows, E experts in all, e experts here, D width.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from jax import Array
from jaxtyping import Float, Int, PyTree


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


class Code(NamedTuple):
    """How rows look while they travel. encode: float[n, D] to a pytree of [n, ...]; decode: back, to fp32[n, D]."""

    encode: Callable[[Array], PyTree[Array]]
    decode: Callable[[PyTree[Array]], Array]


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

    # Rows in a code (MXFP8), where no derivative is taken, since integers travel; `dispatch` takes such rows as well.

    def combine_coded(
        self, rows_RD: Float[Array, "R D"], weights_TK: Float[Array, "T K"], plan: Plan, round: Any, code: Code
    ) -> tuple[Float[Array, "T D"], PyTree[Array]]:
        """As `combine`, and what its gradients need, coded."""
        ...

    def combine_coded_gradients(
        self,
        kept: PyTree[Array],
        weights_TK: Float[Array, "T K"],
        grad_TD: Float[Array, "T D"],
        plan: Plan,
        round: Any,
        code: Code,
    ) -> tuple[PyTree[Array], Float[Array, "T K"]]:
        """The gradients of `combine_coded` in its rows [R, ...], coded as they arrived, and in its weights."""
        ...

    def dispatch_coded_gradient(
        self, grad_RD: Float[Array, "R D"], plan: Plan, round: Any, code: Code
    ) -> Float[Array, "T D"]:
        """fp32: the gradient of `dispatch`."""
        ...
