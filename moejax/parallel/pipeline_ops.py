"""The ops of the executor: what a stage does in one tick, by op and kind of stage, with inputs or residuals kept.

                     inputs kept                                  residuals kept
    forward          x --> y                                      x --> y, stash
    backward         x --> stash of its own; dy --> dx, sums      stash, dy --> dx, sums
    backward_input   x --> stash of its own; dy --> dx            stash, dy --> dx, between
    backward_weight  x --> stash of its own; dy --> sums          stash, between --> sums

The last virtual stage has the loss in its backward. With inputs kept its forward has nothing to do: it runs inside the
backward anyway and alone would feed nobody. With residuals it leaves its output in the slot of its input.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from moejax.config import Recompute
from moejax.context import Context
from moejax.models.transformer import Params
from moejax.parallel import segments
from moejax.parallel.block_program import BlockProgram
from moejax.parallel.layout import StageKind
from moejax.parallel.schedule_wiring import Wiring
from moejax.parallel.schedules import Op
from moejax.parallel.stage import Microbatch, Place, StageProgram, Stash, Totals, add_losses

Row = dict[str, Array]


class Rings(NamedTuple):
    """What waits on a stage. activations, cotangents: [slots, B, S, D]. stash, between: see
    `StageProgram.empty_stash`."""

    activations: Array
    cotangents: Array
    stash: Stash
    between: Stash


class Carry(NamedTuple):
    rings: Rings
    gradients: Params
    totals: Totals


@dataclass(frozen=True)
class Inside:
    """What every tick sees."""

    program: StageProgram
    wiring: Wiring
    blocks: dict[str, BlockProgram]
    params: Params
    batch: Microbatch
    context_of: Callable[[Array, Microbatch], Context]
    training: bool

    def read(self, row: Row) -> tuple[Microbatch, Context, Place]:
        here = self.microbatch(row["microbatch"])
        context = self.context_of(row["microbatch"], here)
        return here, context, Place(row["dense_slot"], row["moe_slot"], row["layer"])

    def microbatch(self, index: Array) -> Microbatch:
        return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, index, keepdims=False), self.batch)

    def input(self, kind: StageKind, here: Microbatch, carry: Carry, row: Row) -> Array:
        if kind.first:
            return self.program.embed(self.params["embedding"], here.tokens)
        return slot(carry.rings.activations, row["activation_slot"])


def slot(ring: Array, index: Array) -> Array:
    return lax.dynamic_index_in_dim(ring, index, keepdims=False)


def empty_rings(inside: Inside, shape: Any) -> Rings:
    """shape: of an activation."""
    wiring, program = inside.wiring, inside.program
    stash = between = {}
    if inside.training and not wiring.keep_inputs:
        stash = program.empty_stash(inside.blocks, wiring.stash_slots)
        if (wiring.op == Op.BACKWARD_WEIGHT).any():
            between = program.empty_stash(inside.blocks, wiring.between_slots, between=True)
    return Rings(
        jnp.zeros((wiring.activation_slots, *shape.shape), shape.dtype),
        jnp.zeros((wiring.cotangent_slots, *shape.shape), shape.dtype),
        stash,
        between,
    )


class OpOfKind(NamedTuple):
    """A branch of the executor: (inside, carry, row) -> (carry, what is offered to the neighbours)."""

    function: Callable[..., tuple[Carry, Array]]
    kind: StageKind | None

    def __call__(self, inside: Inside, carry: Carry, row: Row) -> tuple[Carry, Array]:
        return self.function(self.kind, inside, carry, row)


def choose(inside: Inside, op: Op, kind: StageKind | None) -> OpOfKind:
    if kind is None:
        return OpOfKind(_idle, None)
    keep_inputs = inside.wiring.keep_inputs
    if op == Op.FORWARD and kind.last and not inside.training:
        return OpOfKind(_evaluate, kind)
    if op == Op.FORWARD and inside.training and not keep_inputs:
        return OpOfKind(_forward_keeping, kind)
    if op == Op.FORWARD:
        return OpOfKind(_idle, None) if kind.last else OpOfKind(_forward, kind)
    with_inputs = {
        Op.BACKWARD: _backward_again,
        Op.BACKWARD_INPUT: _backward_input_again,
        Op.BACKWARD_WEIGHT: _backward_weight_again,
    }
    with_residuals = {
        Op.BACKWARD: _backward,
        Op.BACKWARD_INPUT: _backward_input,
        Op.BACKWARD_WEIGHT: _backward_weight,
    }
    return OpOfKind((with_inputs if keep_inputs else with_residuals)[op], kind)


def _nothing(carry: Carry) -> Array:
    return jnp.zeros(carry.rings.activations.shape[1:], carry.rings.activations.dtype)


def _idle(kind: None, inside: Inside, carry: Carry, row: Row) -> tuple[Carry, Array]:
    del kind, inside, row
    return carry, _nothing(carry)


def _forward(kind: StageKind, inside: Inside, carry: Carry, row: Row) -> tuple[Carry, Array]:
    here, context, place = inside.read(row)
    with jax.named_scope("forward"):
        x = inside.input(kind, here, carry, row)
        return carry, inside.program.forward(kind, inside.params, x, context, place)


def _evaluate(kind: StageKind, inside: Inside, carry: Carry, row: Row) -> tuple[Carry, Array]:
    carry, x = _forward(kind, inside, carry, row)
    here = inside.microbatch(row["microbatch"])
    _, sums = inside.program.head_loss(inside.params["head"], inside.params["embedding"], x, here.labels)
    return carry._replace(totals=add_losses(carry.totals, sums)), x


def _forward_keeping(kind: StageKind, inside: Inside, carry: Carry, row: Row) -> tuple[Carry, Array]:
    here, context, place = inside.read(row)
    rings = carry.rings
    with jax.named_scope("forward"):
        x = inside.input(kind, here, carry, row)
        y, stash, totals = inside.program.keep(
            kind, inside.blocks, inside.params, x, context, place, rings.stash, row["stash_slot"], carry.totals
        )
    rings = rings._replace(stash=stash)
    if kind.last:
        there = lax.dynamic_update_index_in_dim(rings.activations, y, row["activation_slot"], axis=0)
        rings = rings._replace(activations=there)
    return carry._replace(rings=rings, totals=totals), y


def _ends_of_backward(
    kind: StageKind, inside: Inside, here: Microbatch, dx: Array, gradients: Params
) -> tuple[Array, Params]:
    if not kind.first:
        return dx, gradients
    return jnp.zeros_like(dx), inside.program.pull_embedding(inside.params, here, dx, gradients)


def _backward(kind: StageKind, inside: Inside, carry: Carry, row: Row) -> tuple[Carry, Array]:
    here, context, place = inside.read(row)
    with jax.named_scope("backward"):
        dy, gradients, totals = _cotangent(kind, inside, here, context, carry, row)
        dx, gradients = inside.program.pull(
            kind, inside.blocks, inside.params, context, place, carry.rings.stash, row["stash_slot"], dy, gradients
        )
        dx, gradients = _ends_of_backward(kind, inside, here, dx, gradients)
    return carry._replace(gradients=gradients, totals=totals), dx


def _cotangent(
    kind: StageKind, inside: Inside, here: Microbatch, context: Context, carry: Carry, row: Row, y: Array | None = None
) -> tuple[Array, Params, Totals]:
    """Of the stage's output, and gradients and totals with the head's added on the last one. y: its output, if at
    hand."""
    if not kind.last:
        return slot(carry.rings.cotangents, row["cotangent_slot"]), carry.gradients, carry.totals
    y = slot(carry.rings.activations, row["activation_slot"]) if y is None else y
    return inside.program.pull_head(inside.params, y, here, context, carry.gradients, carry.totals)


def _backward_input(kind: StageKind, inside: Inside, carry: Carry, row: Row) -> tuple[Carry, Array]:
    here, context, place = inside.read(row)
    rings = carry.rings
    with jax.named_scope("backward_input"):
        dy, gradients, totals = _cotangent(kind, inside, here, context, carry, row)
        dx, between = inside.program.pull_input(
            kind,
            inside.blocks,
            inside.params,
            context,
            place,
            rings.stash,
            row["stash_slot"],
            dy,
            rings.between,
            row["between_slot"],
        )
        dx, gradients = _ends_of_backward(kind, inside, here, dx, gradients)
    return Carry(rings._replace(between=between), gradients, totals), dx


def _backward_weight(kind: StageKind, inside: Inside, carry: Carry, row: Row) -> tuple[Carry, Array]:
    _, context, place = inside.read(row)
    rings = carry.rings
    with jax.named_scope("backward_weight"):
        gradients = inside.program.pull_weight(
            kind,
            inside.blocks,
            inside.params,
            context,
            place,
            rings.stash,
            row["stash_slot"],
            rings.between,
            row["between_slot"],
            carry.gradients,
        )
    return carry._replace(gradients=gradients), _nothing(carry)


# --- with the stage run again --------------------------------------------------------------------------------------


def _again(
    kind: StageKind, inside: Inside, here: Microbatch, context: Context, place: Place, carry: Carry, row: Row
) -> tuple[Array, Stash, Totals]:
    x = inside.input(kind, here, carry, row)
    stash = inside.program.empty_stash(inside.blocks, 1)
    return inside.program.keep(kind, inside.blocks, inside.params, x, context, place, stash, 0, carry.totals)


def _backward_again(kind: StageKind, inside: Inside, carry: Carry, row: Row) -> tuple[Carry, Array]:
    if inside.program.recompute == Recompute.full:
        return _backward_in_segments(kind, inside, carry, row)
    here, context, place = inside.read(row)
    with jax.named_scope("backward"):
        y, stash, totals = _again(kind, inside, here, context, place, carry, row)
        carry = carry._replace(totals=totals)
        dy, gradients, totals = _cotangent(kind, inside, here, context, carry, row, y)
        dx, gradients = inside.program.pull(kind, inside.blocks, inside.params, context, place, stash, 0, dy, gradients)
        dx, gradients = _ends_of_backward(kind, inside, here, dx, gradients)
    return carry._replace(gradients=gradients, totals=totals), dx


def _backward_in_segments(kind: StageKind, inside: Inside, carry: Carry, row: Row) -> tuple[Carry, Array]:
    here, context, place = inside.read(row)

    def cotangent(y: Array, totals: Totals) -> tuple[Array, Params, Totals]:
        return _cotangent(kind, inside, here, context, carry._replace(totals=totals), row, y)

    with jax.named_scope("backward"):
        x = inside.input(kind, here, carry, row)
        dx, gradients, totals = segments.backward(
            inside.program, kind, inside.blocks, inside.params, x, context, place, carry.totals, cotangent
        )
        dx, gradients = _ends_of_backward(kind, inside, here, dx, gradients)
    return carry._replace(gradients=gradients, totals=totals), dx


def _backward_input_again(kind: StageKind, inside: Inside, carry: Carry, row: Row) -> tuple[Carry, Array]:
    here, context, place = inside.read(row)
    with jax.named_scope("backward_input"):
        y, stash, totals = _again(kind, inside, here, context, place, carry, row)
        carry = carry._replace(totals=totals)
        dy, gradients, totals = _cotangent(kind, inside, here, context, carry, row, y)
        unused = inside.program.empty_stash(inside.blocks, 1, between=True)
        dx, _ = inside.program.pull_input(kind, inside.blocks, inside.params, context, place, stash, 0, dy, unused, 0)
        dx, gradients = _ends_of_backward(kind, inside, here, dx, gradients)
    return carry._replace(gradients=gradients, totals=totals), dx


def _backward_weight_again(kind: StageKind, inside: Inside, carry: Carry, row: Row) -> tuple[Carry, Array]:
    here, context, place = inside.read(row)
    with jax.named_scope("backward_weight"):
        y, stash, _ = _again(kind, inside, here, context, place, carry, row)
        # losses, embedding and head were added with the input gradient
        dy, _, _ = _cotangent(kind, inside, here, context, carry, row, y)
        _, gradients = inside.program.pull(
            kind, inside.blocks, inside.params, context, place, stash, 0, dy, carry.gradients
        )
    return carry._replace(gradients=gradients), _nothing(carry)
