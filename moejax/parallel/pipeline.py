"""The executor: runs any wired schedule table inside the manual region, one scan over ticks.

    tick t on stage s:  read the row (op, microbatch, slots) --switch--> forward or backward of one kind of stage, or nothing
                        offer the result to both neighbours (two ppermutes) --store what the row says--> rings

A branch is one op of one kind of stage (`layout.StageKind`), so no layer is ever skipped at run time and an idle tick
costs nothing. Stage inputs wait in a ring whose size comes from the table, gradients are in the carry, and nothing
differentiates through the scan: memory does not grow with the number of microbatches.

The predicate of the switch depends on the pipeline stage alone, so all devices of an expert-parallel group take the same
branch and its collectives meet.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from moejax.context import Context
from moejax.models.transformer import Params
from moejax.parallel.layout import StageKind
from moejax.parallel.schedule_makers import make_schedule
from moejax.parallel.schedule_wiring import From, Wiring, wire
from moejax.parallel.schedules import Op
from moejax.parallel.stage import Microbatch, Place, StageProgram, Totals

PIPELINE_AXIS = "pp"
RING_SIZES = ("activation_slots", "cotangent_slots", "stash_slots", "keep_inputs")


class Rings(NamedTuple):
    """[slots, B, S, D] each: stage inputs that wait for their ops, and output cotangents that do."""

    activations: Array
    cotangents: Array


class Carry(NamedTuple):
    rings: Rings
    gradients: Params
    totals: Totals


def run(
    program: StageProgram,
    wiring: Wiring,
    params: Params,
    batch: Microbatch,
    context_of: Callable[[Array, Microbatch], Context],
) -> tuple[Params, Totals]:
    """fp32 gradients of this device's share of the loss (by slot for stacked blocks), and its totals.

    batch: int32[M, B, S] each, this device's sequences. context_of(m, microbatch): the context of microbatch m.
    Of a table without backwards (`forward_only`) the gradients are {} and the totals hold the losses alone.
    Runs inside a region that is manual over the pipeline axis.
    """
    stages = wiring.op.shape[1]
    table = _rows(program, wiring)
    stage = lax.axis_index(PIPELINE_AXIS) if stages > 1 else jnp.zeros((), jnp.int32)
    rows = jax.tree.map(lambda x: jnp.take(jnp.asarray(x), stage, axis=1), table)
    branches, _ = _branches(program, wiring)
    shape = (*batch.tokens.shape[1:], program.model.d_model)

    def tick(carry: Carry, row: dict[str, Array]) -> tuple[Carry, None]:
        operands = (carry, row, batch)
        if len(branches) == 1:
            carry, out = branches[0](program, params, context_of, *operands)
        else:
            bound = [_bind(branch, program, params, context_of) for branch in branches]
            carry, out = lax.switch(row["branch"], bound, *operands)
        return carry._replace(rings=_deliver(carry.rings, out, row, wiring, stages)), None

    rings = Rings(
        jnp.zeros((wiring.activation_slots, *shape), program.compute),
        jnp.zeros((wiring.cotangent_slots, *shape), program.compute),
    )
    trained = params if np.any(wiring.op == Op.BACKWARD) else {}
    zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), trained)
    carry, _ = lax.scan(tick, Carry(rings, zeros, program.zero_totals()), rows)
    return carry.gradients, carry.totals


def forward_only(stages: int, microbatches: int) -> Wiring:
    """The table of evaluation: every microbatch straight through."""
    whole = make_schedule("gpipe", stages, microbatches)
    ticks = microbatches + stages - 1  # GPipe runs all forwards first
    wiring = wire(whole, keep_inputs=False)
    tables = {f.name: getattr(wiring, f.name)[:ticks] for f in dataclasses.fields(wiring) if f.name not in RING_SIZES}
    assert np.sum(tables["op"] == Op.FORWARD) == stages * microbatches
    return dataclasses.replace(wiring, **tables, cotangent_slots=1)


def _bind(branch: Any, program: StageProgram, params: Params, context_of: Any) -> Any:
    return lambda *operands: branch(program, params, context_of, *operands)


def _branches(program: StageProgram, wiring: Wiring) -> tuple[list[Any], np.ndarray]:
    """The distinct programs of this table, and which one runs at each tick and stage: int32 [ticks, stages]."""
    made: list[tuple[Any, StageKind | None]] = []
    training = bool(np.any(wiring.op == Op.BACKWARD))
    index = np.zeros(wiring.op.shape, np.int32)
    for (tick, stage), op in np.ndenumerate(wiring.op):
        kind = program.layout.kinds[program.layout.kind_of[stage, wiring.chunk[tick, stage]]] if op != Op.IDLE else None
        # the last virtual stage computes its forward inside its backward: alone it would feed nobody
        if kind is None or (op == Op.FORWARD and kind.last and training):
            entry = (_idle, None)
        elif op == Op.FORWARD and kind.last:
            entry = (_evaluate, kind)
        else:
            entry = ({Op.FORWARD: _forward, Op.BACKWARD: _backward}[Op(op)], kind)
        if entry not in made:
            made.append(entry)
        index[tick, stage] = made.index(entry)
    return [_of_kind(*entry) for entry in made], index


def _of_kind(branch: Any, kind: StageKind | None) -> Any:
    return lambda *arguments: branch(kind, *arguments)


def _rows(program: StageProgram, wiring: Wiring) -> dict[str, np.ndarray]:
    """Everything a tick reads, int32 [ticks, stages, ...]."""
    layout, (_, branch) = program.layout, _branches(program, wiring)
    stage, chunk = np.arange(wiring.op.shape[1])[None, :], np.maximum(wiring.chunk, 0)
    return {
        "branch": branch,
        "microbatch": np.maximum(wiring.microbatch, 0),
        "dense_slot": layout.first_dense_slot[stage, chunk],
        "moe_slot": layout.first_moe_slot[stage, chunk],
        "layer": layout.first_layer[stage, chunk],
        "activation_slot": np.maximum(wiring.activation_slot, 0),
        "cotangent_slot": np.maximum(wiring.cotangent_slot, 0),
        "store_activation_from": wiring.store_activation_from,
        "store_activation_slot": np.maximum(wiring.store_activation_slot, 0),
        "store_cotangent_from": wiring.store_cotangent_from,
        "store_cotangent_slot": np.maximum(wiring.store_cotangent_slot, 0),
    }


def _idle(
    kind: None, program: StageProgram, params: Params, context_of: Any, carry: Carry, row: Any, batch: Any
) -> Any:
    del kind, program, params, context_of, row, batch
    return carry, jnp.zeros(carry.rings.activations.shape[1:], carry.rings.activations.dtype)


def _read(batch: Microbatch, row: dict[str, Array]) -> tuple[Microbatch, Place]:
    here = jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, row["microbatch"], keepdims=False), batch)
    return here, Place(row["dense_slot"], row["moe_slot"], row["layer"])


def _slot(ring: Array, slot: Array) -> Array:
    return lax.dynamic_index_in_dim(ring, slot, keepdims=False)


def _forward(
    kind: StageKind, program: StageProgram, params: Params, context_of: Any, carry: Carry, row: Any, batch: Microbatch
) -> tuple[Carry, Array]:
    here, place = _read(batch, row)
    x = None if kind.first else _slot(carry.rings.activations, row["activation_slot"])
    with jax.named_scope("forward"):
        return carry, program.forward(kind, params, x, here, context_of(row["microbatch"], here), place)


def _evaluate(
    kind: StageKind, program: StageProgram, params: Params, context_of: Any, carry: Carry, row: Any, batch: Microbatch
) -> tuple[Carry, Array]:
    here, _ = _read(batch, row)
    carry, x = _forward(kind, program, params, context_of, carry, row, batch)
    _, sums = program.head_loss(params["head"], params["embedding"], x, here.labels)
    totals = carry.totals
    totals = totals._replace(cross_entropy=totals.cross_entropy + sums.cross_entropy, z=totals.z + sums.z)
    return carry._replace(totals=totals), x


def _backward(
    kind: StageKind, program: StageProgram, params: Params, context_of: Any, carry: Carry, row: Any, batch: Microbatch
) -> tuple[Carry, Array]:
    here, place = _read(batch, row)
    x = None if kind.first else _slot(carry.rings.activations, row["activation_slot"])
    cotangent = None if kind.last else _slot(carry.rings.cotangents, row["cotangent_slot"])
    context = context_of(row["microbatch"], here)
    with jax.named_scope("backward"):
        dx, gradients, totals = program.backward(
            kind, params, x, cotangent, here, context, place, carry.gradients, carry.totals
        )
    return carry._replace(gradients=gradients, totals=totals), dx


def _deliver(rings: Rings, out: Array, row: dict[str, Array], wiring: Wiring, stages: int) -> Rings:
    """Send the tick's result both ways where anyone listens there, and store what this stage's row says."""
    offered = {From.SELF: out}
    for channel, step in ((From.BELOW, 1), (From.ABOVE, -1)):
        if np.any(wiring.store_activation_from == channel) or np.any(wiring.store_cotangent_from == channel):
            neighbours = [(s, (s + step) % stages) for s in range(stages)]
            offered[channel] = lax.ppermute(out, PIPELINE_AXIS, neighbours)

    def store(ring: Array, origins: Array, slots: Array, table: np.ndarray) -> Array:
        for arrival in range(table.shape[-1]):
            used = [channel for channel in offered if np.any(table[..., arrival] == channel)]
            for channel in used:
                there = _slot(ring, slots[arrival])
                value = jnp.where(origins[arrival] == channel, offered[channel], there)
                ring = lax.dynamic_update_index_in_dim(ring, value, slots[arrival], axis=0)
        return ring

    return Rings(
        store(
            rings.activations, row["store_activation_from"], row["store_activation_slot"], wiring.store_activation_from
        ),
        store(rings.cotangents, row["store_cotangent_from"], row["store_cotangent_slot"], wiring.store_cotangent_from),
    )
