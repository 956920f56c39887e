"""Proves that a schedule can be run, or says in one sentence why not.

    Schedule --check--> every op once --> after what it needs --> every slot read before it is overwritten

The first two are read off the table. The third is proved of the wiring by running it on names instead of tensors,
knowing nothing of how `wire` chose the slots.
"""

from typing import NoReturn

import numpy as np

from moejax.errors import UserError
from moejax.parallel.schedule_wiring import From, Wiring, wire
from moejax.parallel.schedules import PLACEMENTS, Op, Schedule, op_ticks

_NAMES = {op: op.name.lower().replace("_", " ") for op in Op}


def check(schedule: Schedule) -> None:
    """Returns if the schedule is valid; raises UserError otherwise, naming tick, stage, op, microbatch and chunk.

    Valid means: sizes and arrays agree; each microbatch has on each virtual stage one FORWARD, and one BACKWARD or one
    BACKWARD_INPUT and one BACKWARD_WEIGHT; a forward runs in a later tick than the forward of the virtual stage before,
    a BACKWARD or BACKWARD_INPUT in a later tick than its own forward and the next virtual stage's, a BACKWARD_WEIGHT in
    a later tick than its BACKWARD_INPUT; and the wiring, inputs kept or not, never overwrites what is still needed.
    """
    _check_cells(schedule)
    _check_once(schedule)
    _check_order(schedule)
    for keep_inputs in (True, False):
        check_wiring(schedule, wire(schedule, keep_inputs))


def _refuse(schedule: Schedule, why: str) -> NoReturn:
    raise UserError(f"schedule {schedule.name}: {why}")


def _at(schedule: Schedule, tick: int, stage: int) -> str:
    op, m, chunk = (int(a[tick, stage]) for a in (schedule.op, schedule.microbatch, schedule.chunk))
    return f"tick {tick}, stage {stage}, {_NAMES[Op(op)]} of microbatch {m}, chunk {chunk}"


def _check_cells(schedule: Schedule) -> None:
    sizes = (("stages", schedule.stages), ("microbatches", schedule.microbatches), ("chunks", schedule.chunks))
    for what, value in sizes:
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
            _refuse(schedule, f"{what} is {value!r}, but must be a whole number of at least 1")
    if schedule.placement not in PLACEMENTS:
        _refuse(schedule, f"placement is {schedule.placement!r}, but must be one of {', '.join(PLACEMENTS)}")
    for what in ("op", "microbatch", "chunk"):
        array = getattr(schedule, what)
        if not np.issubdtype(array.dtype, np.integer):
            _refuse(schedule, f"the {what} table holds {array.dtype} values, but must hold whole numbers (int32)")
        if array.ndim != 2 or array.shape != schedule.op.shape or array.shape[1] != schedule.stages:
            _refuse(
                schedule, f"the {what} table has shape {array.shape}, but must be [ticks, {schedule.stages} stages]"
            )
    idle = schedule.op == Op.IDLE
    bad = ~np.isin(schedule.op, list(Op))
    if bad.any():
        tick, stage = np.argwhere(bad)[0]
        _refuse(schedule, f"tick {tick}, stage {stage} has op {schedule.op[tick, stage]}, but ops are 0 to {max(Op)}")
    for what, limit in (("microbatch", schedule.microbatches), ("chunk", schedule.chunks)):
        array = getattr(schedule, what)
        bad = np.where(idle, array != -1, (array < 0) | (array >= limit))
        if bad.any():
            tick, stage = np.argwhere(bad)[0]
            if idle[tick, stage]:
                _refuse(
                    schedule, f"tick {tick}, stage {stage} is idle, so its {what} must be -1, not {array[tick, stage]}"
                )
            _refuse(schedule, f"{_at(schedule, tick, stage)} is out of range: {what} goes from 0 to {limit - 1}")


def _check_once(schedule: Schedule) -> None:
    """Every forward, every cotangent and every weight gradient has one op that makes it.

    Sorted keys rather than a table of microbatches x virtual stages: a microbatch mistyped as 10**9 must not allocate.
    """
    kinds = ((Op.FORWARD,), (Op.BACKWARD, Op.BACKWARD_INPUT), (Op.BACKWARD, Op.BACKWARD_WEIGHT))
    for ops in kinds:
        tick, stage = np.nonzero(np.isin(schedule.op, ops))
        place = schedule.virtual_stage(stage, schedule.chunk[tick, stage]).astype(np.int64)
        key = schedule.microbatch[tick, stage].astype(np.int64) * schedule.virtual_stages + place
        order = np.argsort(key, kind="stable")
        twice = np.flatnonzero(key[order][1:] == key[order][:-1])
        if len(twice):
            pair = order[twice[0] : twice[0] + 2].tolist()
            first, second = (_at(schedule, int(tick[i]), int(stage[i])) for i in pair)
            _refuse(schedule, f"{second} does again what {first} has done: remove one of the two")
        if len(key) < schedule.microbatches * schedule.virtual_stages:
            gap = int(np.flatnonzero(np.append(key[order], -1) != np.arange(len(key) + 1))[0])
            _refuse(
                schedule,
                _missing(schedule, " or ".join(_NAMES[op] for op in ops), *divmod(gap, schedule.virtual_stages)),
            )


def _missing(schedule: Schedule, what: str, microbatch: int, virtual_stage: int) -> str:
    """Names the op that has no partner, or the sizes of the table if there is none either."""
    home = f"microbatch {microbatch}, chunk {virtual_stage // schedule.stages}"
    mine = schedule.virtual_stage(np.arange(schedule.stages), schedule.chunk) == virtual_stage
    mine &= (schedule.microbatch == microbatch) & (schedule.op != Op.IDLE)
    if mine.any():
        return f"{_at(schedule, *np.argwhere(mine)[0].tolist())} has no {what} to go with it: add one"
    sizes = f"{schedule.microbatches} microbatches and {schedule.chunks} chunks"
    return f"stage {schedule.stage_of(virtual_stage)} has no {what} of {home}: add one, or correct the table's {sizes}"


def _needs(schedule: Schedule) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """For each op, as (tick, stage) and in tick order, the ops whose results it needs."""
    forward, backward, _ = (when.tolist() for when in op_ticks(schedule))
    home = [int(schedule.stage_of(q)) for q in range(schedule.virtual_stages)]
    needs = {}
    for tick, stage in np.argwhere(schedule.op != Op.IDLE).tolist():
        op, m = int(schedule.op[tick, stage]), int(schedule.microbatch[tick, stage])
        q = int(schedule.virtual_stage(stage, int(schedule.chunk[tick, stage])))
        if op == Op.FORWARD:
            wanted = [(forward[m][q - 1], home[q - 1])] if q else []
        elif op == Op.BACKWARD_WEIGHT:
            wanted = [(backward[m][q], stage)]
        else:
            wanted = [(forward[m][q], stage)]
            if q + 1 < schedule.virtual_stages:
                wanted.append((backward[m][q + 1], home[q + 1]))
        needs[tick, stage] = wanted
    return needs


def _check_order(schedule: Schedule) -> None:
    needs = _needs(schedule)
    for (tick, stage), wanted in needs.items():
        for need in wanted:
            if need[0] < tick:
                continue
            circle = _circle(needs)
            if circle:
                links = "; ".join(f"{_at(schedule, *op)} waits for {_at(schedule, *other)}" for op, other in circle)
                _refuse(schedule, f"a circle that no change of ticks can open: {links}; change the order on a stage")
            _refuse(
                schedule,
                f"{_at(schedule, tick, stage)} needs what {_at(schedule, *need)} makes, which can be used from "
                f"tick {need[0] + 1} on: move it there or later",
            )


def _circle(needs: dict[tuple[int, int], list[tuple[int, int]]]) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Ops of different stages that wait for each other when each stage keeps its order: (op, what it waits for) pairs.

    Empty when the stages, each at its own pace, get through: then only the ticks are wrong; or when one stage alone has
    an op before what it needs.
    """
    queues: dict[int, list[tuple[int, int]]] = {}
    for op in needs:
        queues.setdefault(op[1], []).append(op)
    at = dict.fromkeys(queues, 0)
    done: set[tuple[int, int]] = set()
    moved = True
    while moved:
        moved = False
        for stage, queue in queues.items():
            while at[stage] < len(queue) and done.issuperset(needs[queue[at[stage]]]):
                done.add(queue[at[stage]])
                at[stage] += 1
                moved = True
    stuck = {stage: queue[at[stage]] for stage, queue in queues.items() if at[stage] < len(queue)}
    if not stuck:
        return []
    path: list[tuple[tuple[int, int], tuple[int, int]]] = []
    seen: dict[int, int] = {}
    stage = next(iter(stuck))
    while stage not in seen:
        seen[stage] = len(path)
        path.append((stuck[stage], next(need for need in needs[stuck[stage]] if need not in done)))
        stage = path[-1][1][1]
    circle = path[seen[stage] :]
    return circle if len(circle) > 1 else []


def check_wiring(schedule: Schedule, wiring: Wiring) -> None:
    """Runs the wiring on names: every op reads what it should, and no slot is overwritten while it is still wanted.

    For schedules whose ops occur once and in order. Raises UserError naming tick, stage, op and slot.
    """
    when = op_ticks(schedule)
    split = {(m, q) for m, q in np.argwhere(when.weight != when.backward).tolist()}
    last = schedule.virtual_stages - 1
    slots = {
        "activation": wiring.activation_slot,
        "cotangent": wiring.cotangent_slot,
        "stash": wiring.stash_slot,
        "between": wiring.between_slot,
    }
    sizes = {
        "activation": wiring.activation_slots,
        "cotangent": wiring.cotangent_slots,
        "stash": wiring.stash_slots,
        "between": wiring.between_slots,
    }
    stores = (
        ("activation", wiring.store_activation_from, wiring.store_activation_slot),
        ("cotangent", wiring.store_cotangent_from, wiring.store_cotangent_slot),
    )
    # By ring, stage and slot: the (microbatch, virtual stage) it holds, and how often that is still to be read.
    held: dict[tuple[str, int, int], tuple[tuple[int, int], int]] = {}

    def put(ring: str, stage: int, slot: int, value: tuple[int, int], why: str) -> None:
        old, left = held.get((ring, stage, slot), (value, 0))
        if not 0 <= slot < sizes[ring]:
            _refuse(schedule, f"{why} is to go to {ring} slot {slot}, but there are {sizes[ring]}: number them from 0")
        if left:
            _refuse(schedule, f"{why} is to go to {ring} slot {slot}, where {_value(schedule, old)} is still wanted")
        backwards = 2 if value in split else 1
        reads = {"activation": 1, "cotangent": backwards, "stash": backwards, "between": 1}[ring]
        if ring == "activation" and wiring.keep_inputs:
            reads += backwards
        elif ring == "activation" and value[1] == last:  # its output takes the place of its input
            reads += 1
        held[ring, stage, slot] = value, reads

    for tick in range(schedule.ticks):
        sent: dict[int, tuple[str, tuple[int, int]]] = {}
        for stage in np.flatnonzero(schedule.op[tick] != Op.IDLE).tolist():
            op, m = int(schedule.op[tick, stage]), int(schedule.microbatch[tick, stage])
            q = int(schedule.virtual_stage(stage, int(schedule.chunk[tick, stage])))
            wanted = {
                "activation": q > 0
                and (op == Op.FORWARD or wiring.keep_inputs or (q == last and op != Op.BACKWARD_WEIGHT)),
                "cotangent": q < last and op != Op.FORWARD,
                "stash": op != Op.FORWARD,
                "between": op == Op.BACKWARD_WEIGHT,
            }
            for ring in (ring for ring, wants in wanted.items() if wants):
                slot = int(slots[ring][tick, stage])
                value, left = held.get((ring, stage, slot), (None, 0))
                if value != (m, q):
                    there = "nothing" if value is None else _value(schedule, value)
                    _refuse(schedule, f"{_at(schedule, tick, stage)} reads {ring} slot {slot}, which holds {there}")
                held[ring, stage, slot] = (m, q), left - 1
            if op == Op.FORWARD:
                at = _at(schedule, tick, stage)
                put("stash", stage, int(wiring.stash_slot[tick, stage]), (m, q), f"{at}: what it keeps")
                if q < last:
                    sent[stage] = "activation", (m, q + 1)
            elif op != Op.BACKWARD_WEIGHT and q > 0:
                sent[stage] = "cotangent", (m, q - 1)
            if op == Op.BACKWARD_INPUT:
                at = _at(schedule, tick, stage)
                put("between", stage, int(wiring.between_slot[tick, stage]), (m, q), f"{at}: what it hands on")
        for ring, origin, target in stores:
            for stage, place in np.argwhere(origin[tick] != From.NOBODY).tolist():
                channel = From(int(origin[tick, stage, place]))
                sender = (stage + {From.BELOW: -1, From.ABOVE: 1}.get(channel, 0)) % schedule.stages
                kind, value = sent.get(sender, ("nothing", (0, 0)))
                if kind != ring:
                    lost = f"tick {tick}, stage {stage} is to store the {ring} of stage {sender}"
                    _refuse(schedule, f"{lost}, which sends {kind} in this tick")
                why = f"{_at(schedule, tick, sender)}: the {ring} it sends to stage {stage}"
                put(ring, stage, int(target[tick, stage, place]), value, why)


def _value(schedule: Schedule, value: tuple[int, int]) -> str:
    return f"microbatch {value[0]}, chunk {value[1] // schedule.stages}"
