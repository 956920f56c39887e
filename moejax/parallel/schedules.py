"""A pipeline schedule is a table: which op each stage runs at each tick. Here is the table and what it costs.

    make_schedule / load_csv --> Schedule --check--> proven --wire--> slots and arrivals --> the executor
                                    |--> step_time, bubble, peak_stash, peak_messages      (this file)
                                    `--> timeline as text or SVG

The model is cut into `stages * chunks` virtual stages, numbered in model order. Placement says where they live:

    loop:  virtual stage q lives on stage q % stages; stage 0 holds 0, S, 2S, ... (S = stages)
    v:     even chunks go up the stages, odd chunks come back down; with two, stage 0 holds the first and the last

A tick is one op on one stage; what it yields is sent at the end of the tick and can be used from the next tick on.
Everything is numpy: a schedule is made, proven and priced before a device is touched.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from moejax.errors import UserError

PLACEMENTS = ("loop", "v")


class Op(IntEnum):
    """What a stage does in a tick. The numbers are the branches of the executor's switch."""

    IDLE = 0
    FORWARD = 1
    BACKWARD = 2  # input and weight gradient together
    BACKWARD_INPUT = 3  # the cotangent for the stage before
    BACKWARD_WEIGHT = 4  # what is left of the backward; waits for nobody else and nobody waits for it


@dataclass(frozen=True, eq=False)
class Schedule:
    """The table `(op, microbatch, chunk)[tick, stage]` and the sizes it was made for.

    op, microbatch, chunk: int32 [ticks, stages]; microbatch and chunk are -1 where op is IDLE.
    Nothing is verified here: `schedule_check.check` does that, and says why not. Two schedules are equal only if they
    are the same object, so that one can be hashed and used as a static argument.
    """

    name: str
    stages: int
    microbatches: int
    chunks: int
    placement: str
    op: np.ndarray
    microbatch: np.ndarray
    chunk: np.ndarray

    @property
    def ticks(self) -> int:
        return self.op.shape[0]

    @property
    def virtual_stages(self) -> int:
        return self.stages * self.chunks

    def stage_of(self, virtual_stage):
        """Stage on which a virtual stage lives; ints or arrays."""
        return _reflect(virtual_stage % self.stages, virtual_stage // self.stages, self)

    def virtual_stage(self, stage, chunk):
        """Virtual stage (its place in model order) of a stage's chunk; ints or arrays."""
        return chunk * self.stages + _reflect(stage, chunk, self)


def _reflect(place, chunk, schedule: Schedule):
    """Counts the stages from the other end on the chunks that come back down; its own inverse."""
    down = chunk % 2 if schedule.placement == "v" else chunk * 0
    return place + down * (schedule.stages - 1 - 2 * place)


class OpTicks(NamedTuple):
    """When each op of a valid schedule runs: int32 [microbatches, virtual_stages].

    forward: FORWARD. backward: BACKWARD or BACKWARD_INPUT. weight: BACKWARD or BACKWARD_WEIGHT, so that for a backward
    in one piece backward == weight.
    """

    forward: np.ndarray
    backward: np.ndarray
    weight: np.ndarray


def op_ticks(schedule: Schedule) -> OpTicks:
    """The table read the other way round. Defined for schedules that pass `check`."""
    found = []
    for kinds in ((Op.FORWARD,), (Op.BACKWARD, Op.BACKWARD_INPUT), (Op.BACKWARD, Op.BACKWARD_WEIGHT)):
        tick, stage = np.nonzero(np.isin(schedule.op, kinds))
        when = np.full((schedule.microbatches, schedule.virtual_stages), -1, np.int32)
        chunk = schedule.chunk[tick, stage]
        when[schedule.microbatch[tick, stage], schedule.virtual_stage(stage, chunk)] = tick
        found.append(when)
    return OpTicks(*found)


class Lives(NamedTuple):
    """Values that wait on a stage, int arrays [values]: each is alive in the ticks start..end, both included."""

    stage: np.ndarray
    microbatch: np.ndarray
    virtual_stage: np.ndarray
    start: np.ndarray
    end: np.ndarray


def _lives(schedule: Schedule, start: np.ndarray, end: np.ndarray, first: int = 0) -> Lives:
    """Lives of the values of virtual stages first, first+1, ...; start and end are [microbatches, those stages]."""
    microbatch, place = (i.ravel() for i in np.indices(start.shape))
    return Lives(schedule.stage_of(place + first), microbatch, place + first, start.ravel(), end.ravel())


def activation_lives(
    schedule: Schedule, keep_inputs: bool = True, ends_apart: bool = False, keep_outputs: bool = True
) -> Lives:
    """Stage inputs that arrived: from the tick after they were sent until their last reader has run.

    keep_inputs: the backward reads the input again, so it lives until BACKWARD or BACKWARD_WEIGHT; otherwise until
    FORWARD. On the last virtual stage its place is then taken by that stage's output, which the loss needs in BACKWARD
    or BACKWARD_INPUT. The first virtual stage reads tokens and has none.
    ends_apart: embedding and loss are computed outside of the virtual stages: the first one's input comes just before
    its FORWARD, the last one's output need not wait. keep_outputs=False: it need not wait anyway, since there are no
    backwards.
    """
    when = op_ticks(schedule)
    end = np.array(when.weight if keep_inputs else when.forward)
    if keep_outputs and not keep_inputs and not ends_apart:
        end[:, -1] = when.backward[:, -1]
    sent = when.forward[:, :-1] + 1
    if ends_apart:
        return _lives(schedule, np.concatenate([when.forward[:, :1], sent], axis=1), end)
    return _lives(schedule, sent, end[:, 1:], first=1)


def cotangent_lives(schedule: Schedule, ends_apart: bool = False) -> Lives:
    """Output cotangents that arrived: until BACKWARD or BACKWARD_WEIGHT. The last virtual stage makes its own.

    ends_apart: it gets it from the loss, just after its FORWARD.
    """
    when = op_ticks(schedule)
    if ends_apart:
        arrival = np.concatenate([when.backward[:, 1:], when.forward[:, -1:]], axis=1) + 1
        return _lives(schedule, arrival, when.weight)
    return _lives(schedule, when.backward[:, 1:] + 1, when.weight[:, :-1])


def between_lives(schedule: Schedule) -> Lives:
    """What a BACKWARD_INPUT hands to its BACKWARD_WEIGHT: both ticks included. None for backwards in one piece."""
    when = op_ticks(schedule)
    lives = _lives(schedule, when.backward, when.weight)
    return Lives(*(a[lives.start < lives.end] for a in lives))


def stash_lives(schedule: Schedule) -> Lives:
    """What a forward keeps for its backward: from FORWARD to BACKWARD or BACKWARD_WEIGHT, on every virtual stage."""
    when = op_ticks(schedule)
    return _lives(schedule, when.forward, when.weight)


def _peak(schedule: Schedule, *groups: Lives) -> np.ndarray:
    """Most values alive in one tick, int64 [stages]."""
    change = np.zeros((schedule.ticks + 2, schedule.stages), np.int64)
    for lives in groups:
        np.add.at(change, (lives.start, lives.stage), 1)
        np.add.at(change, (lives.end + 1, lives.stage), -1)
    return change.cumsum(axis=0).max(axis=0)


def peak_stash(schedule: Schedule) -> np.ndarray:
    """Most stage inputs a stage holds at once, in microbatch-chunks, int64 [stages].

    An input counts from the tick after it was sent until BACKWARD or BACKWARD_WEIGHT has run. On the first virtual
    stage, whose inputs are tokens and take no ring slot, it counts from FORWARD, as what any other stash would hold.
    """
    arrived, held = activation_lives(schedule), stash_lives(schedule)
    return _peak(schedule, arrived, Lives(*(a[held.virtual_stage == 0] for a in held)))


def peak_messages(schedule: Schedule) -> np.ndarray:
    """Most messages (activations and cotangents) sent to a stage and not yet used by an op, int64 [stages]."""
    when = op_ticks(schedule)
    activations = _lives(schedule, when.forward[:, :-1] + 1, when.forward[:, 1:], first=1)
    cotangents = _lives(schedule, when.backward[:, 1:] + 1, when.backward[:, :-1])
    return _peak(schedule, activations, cotangents)


def op_times(
    schedule: Schedule, costs: Mapping[Op, float] | None = None, asynchronous: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Start and end of every cell, float64 [ticks, stages] each, in the unit of `costs`; idle cells start = end = 0.

    costs: time of each op the table uses, 1 for all when None.
    asynchronous=False, lockstep: all stages begin a tick together, so a tick lasts as long as its dearest op. This is
      what a scan over ticks with a collective at the end of each does.
    asynchronous=True: each stage runs its own ops in table order, each as soon as its inputs are there; messages take
      no time. This is what one program per stage does, and the figure papers give.
    Raises UserError when costs lacks an op that occurs.
    """
    duration = _durations(schedule, costs)
    if not asynchronous:
        tick_lasts = duration.max(axis=1)
        busy = schedule.op != Op.IDLE
        start = np.where(busy, (np.cumsum(tick_lasts) - tick_lasts)[:, None], 0.0)
        return start, start + duration
    start = np.zeros(schedule.op.shape)
    end = np.zeros(schedule.op.shape)
    free = [0.0] * schedule.stages
    last = schedule.virtual_stages - 1
    forward = np.zeros((schedule.microbatches, schedule.virtual_stages))
    backward = np.zeros_like(forward)
    for tick, stage in np.argwhere(schedule.op != Op.IDLE):  # tick order is an order in which inputs come first
        m, chunk = schedule.microbatch[tick, stage], schedule.chunk[tick, stage]
        q = schedule.virtual_stage(stage, chunk)
        op = schedule.op[tick, stage]
        ready = 0.0
        if op == Op.FORWARD and q > 0:
            ready = forward[m, q - 1]
        elif op in (Op.BACKWARD, Op.BACKWARD_INPUT) and q < last:
            ready = backward[m, q + 1]
        start[tick, stage] = max(free[stage], ready)
        free[stage] = end[tick, stage] = start[tick, stage] + duration[tick, stage]
        if op == Op.FORWARD:
            forward[m, q] = free[stage]
        elif op != Op.BACKWARD_WEIGHT:
            backward[m, q] = free[stage]
    return start, end


def _durations(schedule: Schedule, costs: Mapping[Op, float] | None) -> np.ndarray:
    lookup = np.zeros(len(Op))
    for op in Op:
        if op == Op.IDLE or not (schedule.op == op).any():
            continue
        if costs is not None and not costs.get(op, -1) >= 0:
            raise UserError(
                f"schedule {schedule.name} uses {op.name}, but costs gives no time of zero or more for it: "
                f"add costs[Op.{op.name}]"
            )
        lookup[op] = 1.0 if costs is None else costs[op]
    return lookup[schedule.op]


def step_time(schedule: Schedule, costs: Mapping[Op, float] | None = None, asynchronous: bool = False) -> float:
    """Time from the first op's start to the last op's end, in the unit of `costs`; see `op_times` for the two views.

    With equal costs the lockstep view is the number of ticks in which anything runs.
    """
    return float(op_times(schedule, costs, asynchronous)[1].max(initial=0.0))


def bubble(schedule: Schedule, costs: Mapping[Op, float] | None = None, asynchronous: bool = False) -> float:
    """Idle share of the step, 1 - (sum of all op times) / (stages * step_time); 0 <= bubble < 1.

    For 1F1B it is (S-1)/(M+S-1) for S stages and M microbatches, in either view under equal costs, and in the
    asynchronous view under any (Narayanan et al. 2021, arXiv:2104.04473, give it as (S-1)/M of the busy time).
    """
    total = schedule.stages * step_time(schedule, costs, asynchronous)
    return 1.0 - float(_durations(schedule, costs).sum()) / total if total else 0.0
