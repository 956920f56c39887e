"""The schedules moejax ships, each made from (stages S, microbatches M, chunks v).

    make_schedule(name, S, M, v) --> Schedule

    name              placement  ticks              peak stash of stage s    bubble, equal op costs
    gpipe             loop       2(Mv + S-1)        Mv                       (S-1)/(Mv+S-1)
    1f1b              loop       2(M + S-1)         min(M, S - s)            (S-1)/(M+S-1)
    1f1b_lockstep     loop       2(M + S-1)         min(M, 2(S - s))         (S-1)/(M+S-1)
    interleaved_1f1b  loop       2(Mv + S-1)        (v+1)S - 2s  (a)         (S-1)/(Mv+S-1)
    zero_bubble       loop       3Mv + S-1  (b)     min(M, S) for v=1        (S-1)/(3Mv+S-1)
    zero_bubble_v     v          6M + S-1  (c)      2S + 2 chunk inputs      (S-1)/(6M+S-1)

For M >= S; fewer microbatches than stages leave every schedule waiting. (a) when S divides M: a remainder costs stash,
not ticks. (b) for v >= 2 from M = 2S on. (c) when S divides M; fewer than S ticks more otherwise.

Two clocks matter. When each stage runs at its own pace, only the order of its ops counts, and 1F1B keeps S - s inputs.
When all stages begin a tick together, a tick lasts as long as its dearest op, and 1F1B has cheap forwards and dear
backwards in nearly every tick. `1f1b_lockstep` and `interleaved_1f1b` run only forwards or only backwards in a tick, on
all stages, so that a step takes (M+S-1)(F+B) instead of nearly 2(M+S-1)B, for the larger stash. For S=8, M=32, F=1, B=2
`step_time` in step gives 148 for 1f1b, 117 for 1f1b_lockstep, 106.5 for interleaved_1f1b with v=2 (2026-11).
"""

import numpy as np

from moejax.errors import UserError
from moejax.parallel.schedules import Op, Schedule, peak_stash

NAMES = ("gpipe", "1f1b", "1f1b_lockstep", "interleaved_1f1b", "zero_bubble", "zero_bubble_v")


def make_schedule(name: str, stages: int, microbatches: int, chunks: int = 1) -> Schedule:
    """A schedule by name, for any stages >= 1 and microbatches >= 1; every table passes `schedule_check.check`.

    chunks: virtual stages per stage. gpipe and zero_bubble take any number, 1f1b and 1f1b_lockstep one,
    interleaved_1f1b two or more, zero_bubble_v two.
    Raises UserError for an unknown name, a size below one, or chunks the schedule does not have.
    """
    if name not in NAMES:
        raise UserError(
            f"there is no pipeline schedule named {name!r}: choose one of {', '.join(NAMES)}, or give a CSV file"
        )
    for what, value in (("stages", stages), ("microbatches", microbatches), ("chunks", chunks)):
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
            raise UserError(f"pipeline {what} must be a whole number of at least 1, not {value!r}")
    if name in ("1f1b", "1f1b_lockstep") and chunks != 1:
        raise UserError(f"{name} has one chunk per stage, not {chunks}: set chunks=1, or use interleaved_1f1b")
    if name == "interleaved_1f1b" and chunks < 2:
        raise UserError("interleaved_1f1b needs at least two chunks per stage: set chunks=2, or use 1f1b")
    if name == "zero_bubble_v" and chunks != 2:
        raise UserError(f"zero_bubble_v folds the model once, into two chunks per stage, not {chunks}: set chunks=2")
    sizes = (int(stages), int(microbatches), int(chunks))
    match name:
        case "gpipe":
            return _phased(name, *sizes, groups=[sizes[1]], flush=True)
        case "1f1b":
            return _one_forward_one_backward(name, *sizes)
        case "1f1b_lockstep" | "interleaved_1f1b":
            return _phased(name, *sizes, groups=_groups(*sizes[:2]))
        case "zero_bubble":
            if chunks == 1:
                return _split_backward(_one_forward_one_backward(name, *sizes))
            return _split_backward(_phased(name, *sizes, groups=_groups(*sizes[:2])))
        case _:
            tables = [_zero_bubble_v(name, *sizes[:2], weight_first=first) for first in (True, False)]
            return min(tables, key=lambda table: (table.ticks, peak_stash(table).max()))


def _blank(name: str, stages: int, microbatches: int, chunks: int, placement: str, ticks: int) -> Schedule:
    op = np.full((ticks, stages), Op.IDLE, np.int32)
    return Schedule(name, stages, microbatches, chunks, placement, op, np.full_like(op, -1), np.full_like(op, -1))


def _put(table: Schedule, tick: int, stage: int, op: Op, microbatch: int, chunk: int) -> None:
    table.op[tick, stage], table.microbatch[tick, stage], table.chunk[tick, stage] = op, microbatch, chunk


def _one_forward_one_backward(name: str, stages: int, microbatches: int, chunks: int) -> Schedule:
    """1F1B (PipeDream-Flush, Narayanan et al. 2021, arXiv:2006.09503), every forward as late as it can be.

    Stage s runs the forward of microbatch m at tick s + 2m, its backward at 2S - 1 - s + 2m: the two differ in parity,
    so they never meet. The usual picture runs the first S - s forwards at once; that is the same order and the same
    time, but inputs would arrive before they are wanted and take a slot more.
    """
    table = _blank(name, stages, microbatches, chunks, "loop", 2 * (microbatches + stages - 1))
    for stage in range(stages):
        for m in range(microbatches):
            _put(table, stage + 2 * m, stage, Op.FORWARD, m, 0)
            _put(table, 2 * stages - 1 - stage + 2 * m, stage, Op.BACKWARD, m, 0)
    return table


def _groups(stages: int, microbatches: int) -> list[int]:
    """Microbatches in as many even groups of at least `stages` as there can be; one group when there are fewer.

    A stage takes a group through one chunk, then through the next. A group of exactly S is the classic rule, and the
    reason why others want S to divide M: with fewer, the next chunk's input has not come round yet and the stage waits.
    With more it only comes early, so a remainder is spread over the groups.
    """
    count = max(1, microbatches // stages)
    return [microbatches // count + (i < microbatches % count) for i in range(count)]


def _phased(name: str, stages: int, microbatches: int, chunks: int, groups: list[int], flush: bool = False) -> Schedule:
    """Forwards on even ticks, backwards on odd ticks, on all stages alike; ticks in which nothing runs are left out.

    Stage s runs the k-th forward of the common order in pair of ticks k + s and the k-th backward in pair
    k + delay + (S-1-s). The order takes a group through chunk 0, 1, ..., then the next group; backwards take the chunks
    from the last to the first. The delay is the least for which the last virtual stage has its forward first. With
    groups of S this is the order of Megatron-LM's interleaved schedule (Narayanan et al. 2021, arXiv:2104.04473), with
    one chunk a 1F1B that holds 2(S-s)-1 inputs; one group and a delay past all forwards (`flush`) is GPipe
    (Huang et al. 2018, arXiv:1811.06965), with chunks the breadth-first pipeline (Lamy-Poirier 2022, arXiv:2211.05953).
    """
    # Rows of (microbatch, place of its chunk-0 forward in the order, distance to the next chunk's).
    order, begin, m = [], 0, 0
    for size in groups:
        stride = max(size, stages)
        order += [(m + i, begin + i, stride) for i in range(size)]
        begin, m = begin + chunks * stride, m + size
    delay = max((chunks - 1) * stride for _, _, stride in order) + stages - 1
    if flush:
        delay += microbatches - 1
    table = _blank(name, stages, microbatches, chunks, "loop", 2 * (begin + delay + stages))
    for m, place, stride in order:
        for chunk in range(chunks):
            forward, backward = place + chunk * stride, place + (chunks - 1 - chunk) * stride + delay
            for stage in range(stages):
                _put(table, 2 * (forward + stage), stage, Op.FORWARD, m, chunk)
                _put(table, 2 * (backward + stages - 1 - stage) + 1, stage, Op.BACKWARD, m, chunk)
    used = (table.op != Op.IDLE).any(axis=1)
    cells = (table.op[used], table.microbatch[used], table.chunk[used])
    return Schedule(name, stages, microbatches, chunks, "loop", *cells)


def _split_backward(base: Schedule) -> Schedule:
    """Splits the backwards of a table and uses the weight gradients, for which nobody waits, to fill its idle cells.

    After Qi et al. 2023 (arXiv:2401.10241), where they are placed op by op (ZB-H1). Here they go, oldest first, into
    the idle cells of the base that have one pending, and for the rest whole ticks of weight gradients are put in, one
    on every stage: as early as they can be without emptying a cell that would have been filled, since what waits for
    its weight gradient holds its stash. A tick that all stages spend alike delays nobody, so the order of the base
    stays; and for M >= S every stage idles S - 1 cells, the least there can be on a loop, whose last stage cannot
    begin before tick S - 1.
    """
    idle = base.op == Op.IDLE
    # Pending weight gradients after each tick if none but idle cells ran them: a queue that does not go below zero.
    walk = np.cumsum((base.op == Op.BACKWARD).astype(np.int64) - idle, axis=0)
    pending = walk - np.minimum(0, np.minimum.accumulate(walk, axis=0))
    filled = idle & (np.vstack([np.zeros_like(pending[:1]), pending[:-1]]) > 0)
    # A whole tick takes one from every stage: now, and from each cell still to be filled.
    later = np.where(filled, pending, base.microbatches * base.chunks)[::-1]
    room = np.minimum(pending, np.minimum.accumulate(later, axis=0)[::-1]).min(axis=1)
    whole = np.maximum.accumulate(np.maximum(room, 0))  # whole ticks put in up to and after each tick
    moved = np.arange(base.ticks) + np.concatenate([[0], whole[:-1]])
    ticks = base.ticks + int(whole[-1] + (pending[-1] - whole[-1]).max())
    table = _blank(base.name, base.stages, base.microbatches, base.chunks, base.placement, ticks)
    table.op[moved] = np.where(base.op == Op.BACKWARD, Op.BACKWARD_INPUT, base.op)
    table.microbatch[moved], table.chunk[moved] = base.microbatch, base.chunk
    extra = np.ones((ticks, base.stages), bool)
    extra[moved] = filled
    for stage in range(base.stages):
        source = np.flatnonzero(table.op[:, stage] == Op.BACKWARD_INPUT)
        target = np.flatnonzero(extra[:, stage])[: len(source)]
        table.op[target, stage] = Op.BACKWARD_WEIGHT
        for cells in (table.microbatch, table.chunk):
            cells[target, stage] = cells[source, stage]
    return table


def _zero_bubble_v(name: str, stages: int, microbatches: int, weight_first: bool) -> Schedule:
    """Zero bubble on the V placement, tick by tick by priority, with the stash of 1F1B: 2S half-stage inputs begun.

    After ZB-V of Qi et al. 2024 (arXiv:2405.15362): the last virtual stage sits on stage 0, so the first backward
    comes back to the stages in the order in which they began, and all can end together. A stage runs what it can of:
    an input gradient; a weight gradient, when weight_first; a forward, while fewer than 2S of its microbatch-chunks are
    begun and not finished, one of these being kept for the second chunk, without which no backward would ever come; a
    weight gradient. The second chunk goes before the first. Neither order of the two is best for every M; weight
    gradients first is the one that reaches the bound 6M + S - 1 when S divides M.
    """
    probe = _blank(name, stages, microbatches, 2, "v", 0)
    count = 2 * stages
    home = [int(probe.stage_of(q)) for q in range(count)]
    own = [[int(probe.virtual_stage(stage, chunk)) for chunk in (1, 0)] for stage in range(stages)]
    # Microbatches done per virtual stage; each takes them in order.
    forward, backward, weight = [0] * count, [0] * count, [0] * count
    done = {Op.FORWARD: forward, Op.BACKWARD_INPUT: backward, Op.BACKWARD_WEIGHT: weight}

    def choose(stage: int) -> tuple[Op, int] | None:
        begun = sum(forward[q] - weight[q] for q in own[stage])
        inputs = [q for q in own[stage] if backward[q] < (forward[q] if q == count - 1 else backward[q + 1])]
        forwards = [
            q
            for q in own[stage]
            if forward[q] < (microbatches if q == 0 else forward[q - 1]) and begun < count - (q < stages)
        ]
        weights = [q for q in own[stage] if weight[q] < backward[q]]
        wishes = [(Op.BACKWARD_INPUT, inputs), (Op.FORWARD, forwards), (Op.BACKWARD_WEIGHT, weights)]
        if weight_first:
            wishes[1:] = reversed(wishes[1:])
        return next(((op, ready[0]) for op, ready in wishes if ready), None)

    rows: list[list[tuple[int, int, int]]] = []
    while any(n < microbatches for n in weight):
        row = [(int(Op.IDLE), -1, -1)] * stages
        for op, q in [choice for choice in map(choose, range(stages)) if choice]:  # all choose before any is counted
            row[home[q]] = (int(op), done[op][q], q // stages)
            done[op][q] += 1
        rows.append(row)
    cells = np.moveaxis(np.array(rows, np.int32), -1, 0)
    return Schedule(name, stages, microbatches, 2, "v", *cells)
