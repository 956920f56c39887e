"""The executor: runs any wired schedule table inside the manual region, one scan over ticks.

    tick t on stage s:  read the row (op, microbatch, slots) --switch--> an op of one kind of stage, or nothing
                        offer the result to both neighbours (two ppermutes) --store what the row says--> rings

A branch (`pipeline_ops`) is one op of one kind of stage (`layout.StageKind`), so no layer is ever skipped at run time
and an idle tick costs nothing. What waits is in rings whose sizes come from the table, gradients are in the carry, and
nothing differentiates through the scan: memory does not grow with the number of microbatches.

The predicate of the switch depends on the pipeline stage alone, so all devices of an expert-parallel group take the
same branch and its collectives meet. In the masked mode it depends on the tick alone: all stages run all that any stage
has to do in the tick, and throw away what is not theirs; control flow is then the same on every device, at the price of
the work.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from moejax.config import PipelineMode
from moejax.context import Context
from moejax.models.quantised import is_quantised
from moejax.models.transformer import Params
from moejax.parallel import pipeline_ops, vocabulary
from moejax.parallel.pipeline_ops import Carry, Inside, Rings
from moejax.parallel.schedule_wiring import From, Wiring, wire
from moejax.parallel.schedules import Op, Schedule
from moejax.parallel.stage import Microbatch, StageProgram, Totals

PIPELINE_AXIS = "pp"
SIZES = ("activation_slots", "cotangent_slots", "stash_slots", "between_slots", "keep_inputs", "ends")
BACKWARDS = (Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)


@dataclass(frozen=True)
class Pipeline:
    """A wired schedule, and how it is run."""

    wiring: Wiring
    mode: PipelineMode = PipelineMode.switch

    @property
    def stages(self) -> int:
        return self.wiring.op.shape[1]

    @property
    def training(self) -> bool:
        return bool(np.isin(self.wiring.op, BACKWARDS).any())


def run(
    program: StageProgram,
    pipeline: Pipeline,
    params: Params,
    batch: Microbatch,
    context_of: Callable[[Array, Microbatch], Context],
) -> tuple[Params, Totals]:
    """fp32 gradients of this device's share of the loss (by slot for stacked blocks), and its totals.

    batch: int32[M, B, S] each, this device's sequences. context_of(m, microbatch): the context of microbatch m.
    Of a table without backwards (`forward_only`) the gradients are {} and the totals hold the losses alone.
    Runs inside a region that is manual over the pipeline axis.
    """
    wiring, stages = pipeline.wiring, pipeline.stages
    stage = lax.axis_index(PIPELINE_AXIS) if stages > 1 else jnp.zeros((), jnp.int32)
    shape = jax.ShapeDtypeStruct((*batch.tokens.shape[1:], program.model.d_model), program.compute)
    zero = jnp.zeros((), jnp.int32)
    blocks = {}
    if pipeline.training:
        blocks = program.blocks(params, shape, context_of(zero, jax.tree.map(lambda x: x[0], batch)))
    inside = Inside(program, wiring, blocks, params, batch, context_of, pipeline.training)
    ops, rows = _ops(inside)
    rows = jax.tree.map(lambda x: jnp.take(jnp.asarray(x), stage, axis=1), rows)
    branches = [lambda carry, row, op=op: op(inside, carry, row) for op in ops]
    sets, set_of_tick = _sets(inside, len(ops))
    rows["set"] = jnp.asarray(set_of_tick)

    def work(carry: Carry, row: dict[str, Array]) -> tuple[Carry, Array]:
        if pipeline.mode == PipelineMode.masked:
            run_sets = [lambda *operands, chosen=chosen: _masked(branches, chosen, *operands) for chosen in sets]
            return run_sets[0](carry, row) if len(sets) == 1 else lax.switch(row["set"], run_sets, carry, row)
        return branches[0](carry, row) if len(branches) == 1 else lax.switch(row["branch"], branches, carry, row)

    def tick(carry: Carry, row: dict[str, Array]) -> tuple[Carry, None]:
        if wiring.ends is not None:
            carry = vocabulary.before(inside, carry, row)
        carry, out = work(carry, row)
        carry = carry._replace(rings=_deliver(carry.rings, out, row, wiring, stages))
        if wiring.ends is not None:
            carry = vocabulary.after(inside, carry, row, out)
        return carry, None

    rings = pipeline_ops.empty_rings(inside, shape)
    counted = params if pipeline.training else {}
    zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), counted, is_leaf=is_quantised)
    carry, _ = lax.scan(tick, Carry(rings, zeros, program.zero_totals()), rows)
    return carry.gradients, carry.totals


def forward_only(schedule: Schedule, ends_apart: bool = False) -> Wiring:
    """The forwards of a schedule alone, each as early as it can be, on the same placement: the table of evaluation."""
    queues = [
        [(int(schedule.microbatch[t, s]), int(schedule.chunk[t, s])) for t in np.flatnonzero(forwards)]
        for s, forwards in enumerate((schedule.op == Op.FORWARD).T)
    ]
    done: set[tuple[int, int]] = set()  # (microbatch, virtual stage)
    rows: list[list[tuple[int, int, int]]] = []
    while any(queues):
        row, now = [(int(Op.IDLE), -1, -1)] * schedule.stages, []
        for stage, queue in enumerate(queues):
            if queue:
                m, chunk = queue[0]
                q = int(schedule.virtual_stage(stage, chunk))
                if q == 0 or (m, q - 1) in done:
                    row[stage] = (int(Op.FORWARD), m, chunk)
                    now.append((m, q))
                    queue.pop(0)
        done.update(now)
        rows.append(row)
    cells = np.moveaxis(np.array(rows, np.int32), -1, 0)
    # run backwards in mirror order to make a whole schedule of it, which then can be wired, and is cut off again
    whole = [np.concatenate([table, table[::-1]]) for table in cells]
    whole[0][len(rows) :][whole[0][len(rows) :] == Op.FORWARD] = Op.BACKWARD
    mirrored = dataclasses.replace(schedule, op=whole[0], microbatch=whole[1], chunk=whole[2])
    wiring = wire(mirrored, keep_inputs=False, ends_apart=ends_apart, keep_outputs=False)
    tables = {f.name: getattr(wiring, f.name) for f in dataclasses.fields(wiring) if f.name not in SIZES}
    if wiring.ends is not None:
        tables["ends"] = wiring.ends._replace(
            **{name: table[: len(rows)] for name, table in wiring.ends._asdict().items()}
        )
    cut = {name: table[: len(rows)] if name != "ends" else table for name, table in tables.items()}
    return dataclasses.replace(wiring, **cut, cotangent_slots=1, stash_slots=1)


def branch_shares(program: StageProgram, pipeline: Pipeline) -> np.ndarray:
    """float[stages, branches]: the part of all ticks in which a stage takes each branch of the switch.

    For reading compiled programs, where a conditional does not say how often (`hardware.hlo.switch_shares`).
    """
    nothing: Any = None
    inside = Inside(program, pipeline.wiring, {}, nothing, nothing, nothing, pipeline.training)
    ops, rows = _ops(inside)
    return np.stack([(rows["branch"] == n).mean(axis=0) for n in range(len(ops))], axis=1)


def _ops(inside: Inside) -> tuple[list[Any], dict[str, np.ndarray]]:
    """The distinct ops of this table, and everything a tick reads: int32 [ticks, stages, ...]."""
    wiring, layout = inside.wiring, inside.program.layout
    ops: list[Any] = []
    branch = np.zeros(wiring.op.shape, np.int32)
    for (tick, stage), op in np.ndenumerate(wiring.op):
        kind = layout.kinds[layout.kind_of[stage, wiring.chunk[tick, stage]]] if op != Op.IDLE else None
        made = pipeline_ops.choose(inside, Op(op), kind)
        if made not in ops:
            ops.append(made)
        branch[tick, stage] = ops.index(made)
    stage, chunk = np.arange(wiring.op.shape[1])[None, :], np.maximum(wiring.chunk, 0)
    rows = {
        "branch": branch,
        "microbatch": np.maximum(wiring.microbatch, 0),
        "dense_slot": layout.first_dense_slot[stage, chunk],
        "moe_slot": layout.first_moe_slot[stage, chunk],
        "layer": layout.first_layer[stage, chunk],
        "store_activation_from": wiring.store_activation_from,
        "store_cotangent_from": wiring.store_cotangent_from,
    }
    slots = ("activation_slot", "cotangent_slot", "stash_slot", "between_slot")
    for name in (*slots, "store_activation_slot", "store_cotangent_slot"):
        rows[name] = np.maximum(getattr(wiring, name), 0)
    if wiring.ends is not None:
        for name, table in wiring.ends._asdict().items():
            rows[name] = np.broadcast_to(table[:, None], wiring.op.shape)
        rows |= {"is_first": wiring.first, "is_last": wiring.last}
    return ops, rows


def _sets(inside: Inside, count: int) -> tuple[list[tuple[int, ...]], np.ndarray]:
    """For the masked mode: the distinct sets of branches that run in a tick, and which one does in each."""
    _, rows = _ops(inside)
    sets = [tuple(sorted(set(row))) for row in rows["branch"].tolist()]
    distinct = list(dict.fromkeys(sets))
    assert all(max(chosen) < count for chosen in distinct)
    return distinct, np.array([distinct.index(chosen) for chosen in sets], np.int32)


def _masked(branches: list[Any], chosen: tuple[int, ...], carry: Carry, row: dict[str, Array]) -> tuple[Carry, Array]:
    """Every branch of the tick on every stage, each stage keeping what its own one did."""
    outcomes = [branches[index](carry, row) for index in chosen]
    result = outcomes[0]
    for index, outcome in zip(chosen[1:], outcomes[1:], strict=True):
        mine = row["branch"] == index
        result = jax.tree.map(lambda new, old, mine=mine: jnp.where(mine, new, old), outcome, result)
    return result


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
                there = lax.dynamic_index_in_dim(ring, slots[arrival], keepdims=False)
                value = jnp.where(origins[arrival] == channel, offered[channel], there)
                ring = lax.dynamic_update_index_in_dim(ring, value, slots[arrival], axis=0)
        return ring

    return rings._replace(
        activations=store(
            rings.activations, row["store_activation_from"], row["store_activation_slot"], wiring.store_activation_from
        ),
        cotangents=store(
            rings.cotangents, row["store_cotangent_from"], row["store_cotangent_slot"], wiring.store_cotangent_from
        ),
    )
