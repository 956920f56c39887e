"""From a schedule to what the executor scans over: which buffer slot every op reads, and where every message is put.

    Schedule --wire--> Wiring, one row of int32 arrays per tick

What the executor does with row t on stage s:

    1. run `op` on (microbatch, chunk): it reads its stage input from ring slot `activation_slot`, a backward also its
       output cotangent from `cotangent_slot`, and it yields one tensor: FORWARD the activation for the next virtual
       stage, BACKWARD and BACKWARD_INPUT the cotangent for the virtual stage before, anything else garbage;
    2. offer that tensor on three channels: "up" to stage s+1, "down" to stage s-1 (both modulo stages), and to itself;
    3. store what the arrays say of the three tensors offered to it: the slots may have been read in this very tick.

Slots come from the lives of the values by interval colouring, so a ring is as large as the most values that are ever
alive at once on one stage, and not one slot larger. The first virtual stage reads tokens and the last one computes the
loss in its backward: neither takes a slot for it, and the last forward sends nothing.
"""

import heapq
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from moejax.parallel.schedules import (
    Lives,
    Op,
    Schedule,
    activation_lives,
    between_lives,
    cotangent_lives,
    op_ticks,
    stash_lives,
)


class From(IntEnum):
    """Which of the three tensors offered to a stage is stored."""

    NOBODY = 0
    BELOW = 1  # stage s-1, over its up channel
    ABOVE = 2  # stage s+1, over its down channel
    SELF = 3


class Ends(NamedTuple):
    """When embedding and loss run, if all stages share them: int32 [ticks] each, -1 for none in that tick.

    embed, embed_slot: before the tick, the embedding of this microbatch goes to this activation slot of the first
      virtual stage. loss, loss_slot: after the tick, the last virtual stage's output of this microbatch has its loss
      taken, and its cotangent goes to this cotangent slot there. pull_embed: after the tick, the first virtual stage's
      cotangent of this microbatch goes to the embedding's gradient.
    """

    embed: np.ndarray
    embed_slot: np.ndarray
    loss: np.ndarray
    loss_slot: np.ndarray
    pull_embed: np.ndarray


@dataclass(frozen=True, eq=False)
class Wiring:
    """The rows of the executor's scan. All arrays are int32 [ticks, stages] unless said; -1 means none.

    op, microbatch, chunk: as in the schedule.
    first, last: bool; the op belongs to the first (reads tokens), the last (computes the loss) virtual stage.
    activation_slot: slot the op reads its stage input from; -1 when idle, on the first virtual stage, and for backwards
      when the inputs are not kept. Then the last virtual stage's forward puts its output there, and its backward reads
      it.
    cotangent_slot: slot a backward of any kind reads its output cotangent from; -1 on the last virtual stage.
    stash_slot: slot for what a forward keeps for its own backward (residuals, named checkpoints): the forward writes
      it, the backwards read it, on every virtual stage. To be ignored by an executor that keeps inputs only.
    between_slot: slot for what a BACKWARD_INPUT hands to its BACKWARD_WEIGHT; -1 for other ops.
    store_activation_from, store_activation_slot, store_cotangent_from, store_cotangent_slot: int32
      [ticks, stages, arrivals]; what is stored at the end of the tick (`From`), and where. arrivals is 1 in loop
      placement; on a V two of a kind can reach a stage in one tick, over two channels, and then it is 2.
    activation_slots, cotangent_slots, stash_slots, between_slots: ring sizes, the most over the stages, at least 1.
    keep_inputs: whether a stage input stays in its slot for the backward.
    ends: when all stages do the ends together, None when the first and the last virtual stage do them alone.
    """

    op: np.ndarray
    microbatch: np.ndarray
    chunk: np.ndarray
    first: np.ndarray
    last: np.ndarray
    activation_slot: np.ndarray
    cotangent_slot: np.ndarray
    stash_slot: np.ndarray
    between_slot: np.ndarray
    store_activation_from: np.ndarray
    store_activation_slot: np.ndarray
    store_cotangent_from: np.ndarray
    store_cotangent_slot: np.ndarray
    activation_slots: int
    cotangent_slots: int
    stash_slots: int
    between_slots: int
    keep_inputs: bool
    ends: Ends | None

    @property
    def arrivals(self) -> int:
        """Most messages of one kind that one stage stores in one tick: 1 or 2."""
        return self.store_activation_from.shape[-1]


def wire(schedule: Schedule, keep_inputs: bool = True, ends_apart: bool = False, keep_outputs: bool = True) -> Wiring:
    """Slots and arrivals of a schedule that passes `schedule_check.check`; undefined for others.

    keep_inputs: True for an executor that recomputes a stage from its input, which then stays in the activation ring
    until BACKWARD or BACKWARD_WEIGHT; False for one that keeps what it needs in the stash ring, so that an input's slot
    is free again after FORWARD. A cotangent stays until BACKWARD or BACKWARD_WEIGHT either way.
    ends_apart: embedding and loss are no part of the first and last virtual stage, see `Ends`.
    keep_outputs: False when the table will be cut after its forwards, and no output waits for a loss.
    """
    busy = schedule.op != Op.IDLE
    tick, stage = np.nonzero(busy)
    microbatch = schedule.microbatch[tick, stage]
    virtual_stage = schedule.virtual_stage(stage, schedule.chunk[tick, stage])

    def reads(slots: np.ndarray, readers: np.ndarray) -> np.ndarray:
        out = np.full(schedule.op.shape, -1, np.int32)
        out[tick, stage] = slots[microbatch, virtual_stage]
        return np.where(readers, out, np.int32(-1))

    activations = activation_lives(schedule, keep_inputs, ends_apart, keep_outputs)
    cotangents = cotangent_lives(schedule, ends_apart)
    activation_at, activation_slots = _colour(schedule, activations)
    cotangent_at, cotangent_slots = _colour(schedule, cotangents)
    stash_at, stash_slots = _colour(schedule, stash_lives(schedule))
    between_at, between_slots = _colour(schedule, between_lives(schedule))
    backward = busy & (schedule.op != Op.FORWARD)
    arrivals = max(1, _most_at_once(schedule, activations, -1), _most_at_once(schedule, cotangents, +1))
    activation_from, activation_to = _stores(schedule, activations, activation_at, -1, arrivals)
    cotangent_from, cotangent_to = _stores(schedule, cotangents, cotangent_at, +1, arrivals)
    place = np.full(schedule.op.shape, -1)
    place[tick, stage] = virtual_stage
    first, last = place == 0, place == schedule.virtual_stages - 1
    halves = np.isin(schedule.op, (Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT))
    reads_activation = busy if keep_inputs else schedule.op == Op.FORWARD
    if keep_outputs and not ends_apart:
        reads_activation = reads_activation | (last & np.isin(schedule.op, (Op.BACKWARD, Op.BACKWARD_INPUT)))
    return Wiring(
        op=schedule.op,
        microbatch=schedule.microbatch,
        chunk=schedule.chunk,
        first=first,
        last=last,
        activation_slot=reads(activation_at, reads_activation),
        cotangent_slot=reads(cotangent_at, backward),
        stash_slot=reads(stash_at, busy),
        between_slot=reads(between_at, halves),
        store_activation_from=activation_from,
        store_activation_slot=activation_to,
        store_cotangent_from=cotangent_from,
        store_cotangent_slot=cotangent_to,
        activation_slots=activation_slots,
        cotangent_slots=cotangent_slots,
        stash_slots=stash_slots,
        between_slots=between_slots,
        keep_inputs=keep_inputs,
        ends=_ends(schedule, activation_at, cotangent_at) if ends_apart else None,
    )


def _ends(schedule: Schedule, activation_at: np.ndarray, cotangent_at: np.ndarray) -> Ends:
    when, out = op_ticks(schedule), np.full((5, schedule.ticks), -1, np.int32)
    every = np.arange(schedule.microbatches)
    out[0, when.forward[:, 0]], out[1, when.forward[:, 0]] = every, activation_at[:, 0]
    out[2, when.forward[:, -1]], out[3, when.forward[:, -1]] = every, cotangent_at[:, -1]
    out[4, when.backward[:, 0]] = every
    return Ends(*out)


def _colour(schedule: Schedule, lives: Lives) -> tuple[np.ndarray, int]:
    """Slot of each value, int32 [microbatches, virtual_stages] (-1 where there is none), and the slots needed.

    Values in order of arrival take the lowest slot that is free: for intervals that needs no more slots than the most
    alive at once. A value that arrives at the end of the tick in which another is last read may take its slot.
    """
    slots = np.full((schedule.microbatches, schedule.virtual_stages), -1, np.int32)
    free: list[list[int]] = [[] for _ in range(schedule.stages)]
    taken: list[list[tuple[int, int]]] = [[] for _ in range(schedule.stages)]  # (last tick alive, slot)
    made = [0] * schedule.stages
    rows = np.stack(lives, axis=1)[np.argsort(lives.start, kind="stable")]
    for stage, microbatch, virtual_stage, start, end in rows.tolist():
        while taken[stage] and taken[stage][0][0] < start:
            heapq.heappush(free[stage], heapq.heappop(taken[stage])[1])
        if free[stage]:
            slot = heapq.heappop(free[stage])
        else:
            slot, made[stage] = made[stage], made[stage] + 1
        heapq.heappush(taken[stage], (end, slot))
        slots[microbatch, virtual_stage] = slot
    return slots, max(1, *made)


def _most_at_once(schedule: Schedule, lives: Lives, sender_offset: int) -> int:
    arriving = np.zeros(schedule.op.shape, np.int64)
    from_stages = (lives.virtual_stage + sender_offset >= 0) & (
        lives.virtual_stage + sender_offset < schedule.virtual_stages
    )
    np.add.at(arriving, (lives.start[from_stages] - 1, lives.stage[from_stages]), 1)
    return int(arriving.max(initial=0))


def _stores(
    schedule: Schedule, lives: Lives, slots: np.ndarray, sender_offset: int, arrivals: int
) -> tuple[np.ndarray, np.ndarray]:
    """Origin and slot of the values stored at the end of each tick, int32 [ticks, stages, arrivals] each."""
    origin = np.full((*schedule.op.shape, arrivals), From.NOBODY, np.int32)
    target = np.full_like(origin, -1)
    sending = lives.virtual_stage + sender_offset
    lives = Lives(*(a[(sending >= 0) & (sending < schedule.virtual_stages)] for a in lives))
    sender = schedule.stage_of(lives.virtual_stage + sender_offset)
    if schedule.placement == "loop":  # activations always travel up, round the end too, and cotangents down
        came_from = np.full(sender.shape, From.BELOW if sender_offset < 0 else From.ABOVE)
    else:
        came_from = np.where(sender < lives.stage, From.BELOW, From.ABOVE)
    came_from = np.where(sender == lives.stage, From.SELF, came_from)
    filled = np.zeros(schedule.op.shape, np.int64)
    order = np.lexsort((came_from, lives.start))
    rows = np.stack([lives.start - 1, lives.stage, came_from, slots[lives.microbatch, lives.virtual_stage]], axis=1)
    for tick, stage, channel, slot in rows[order].tolist():
        place = filled[tick, stage]
        origin[tick, stage, place], target[tick, stage, place] = channel, slot
        filled[tick, stage] += 1
    return origin, target
