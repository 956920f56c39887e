"""Pipeline schedules: every table can be run, costs what it says, and bad ones are refused with the reason.

`run_on_names` is the executor in miniature: it sees the wiring only, keeps names where the executor keeps tensors, and
what an op yields is computed from what it read, so one wrong slot anywhere is found at the end.
"""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moejax.errors import UserError
from moejax.parallel.pipeline import forward_only
from moejax.parallel.schedule_check import check, check_wiring
from moejax.parallel.schedule_makers import NAMES, make_schedule
from moejax.parallel.schedule_wiring import wire
from moejax.parallel.schedules import (
    Op,
    Schedule,
    bubble,
    op_times,
    peak_messages,
    peak_stash,
    step_time,
)

CHUNKS = {
    "gpipe": (1, 2, 3),
    "1f1b": (1,),
    "1f1b_lockstep": (1,),
    "interleaved_1f1b": (2, 3),
    "zero_bubble": (1, 2, 3),
    "zero_bubble_v": (2,),
}
KINDS = [(name, chunks) for name in NAMES for chunks in CHUNKS[name]]


every_kind = pytest.mark.parametrize(("name", "chunks"), KINDS)
stage_counts, microbatch_counts = st.integers(1, 8), st.integers(1, 16)


def home(schedule: Schedule, q: int) -> int:
    """Stage of a virtual stage, said once more in other words than the library's."""
    chunk, place = divmod(q, schedule.stages)
    up = list(range(schedule.stages))
    return (up[::-1] if schedule.placement == "v" and chunk % 2 else up)[place]


def run_on_names(wiring, stages: int) -> Counter:
    """What every op read and made, counted. Names: (what, microbatch, virtual stage whose input or output it is)."""
    activations = [[None] * wiring.activation_slots for _ in range(stages)]
    cotangents = [[None] * wiring.cotangent_slots for _ in range(stages)]
    stash = [[None] * wiring.stash_slots for _ in range(stages)]
    between = [[None] * wiring.between_slots for _ in range(stages)]
    log: Counter = Counter()
    for tick in range(len(wiring.op)):
        yielded: list = ["garbage"] * stages
        if wiring.ends and wiring.ends.embed[tick] >= 0:
            embedded = ("activation", int(wiring.ends.embed[tick]), 0)
            activations[int(wiring.first[tick].argmax())][wiring.ends.embed_slot[tick]] = embedded
        for stage in range(stages):
            op, m = Op(int(wiring.op[tick, stage])), int(wiring.microbatch[tick, stage])
            if op == Op.IDLE:
                continue
            # without inputs the last virtual stage leaves its output where its input was, and its loss takes it there
            output_stays = wiring.last[tick, stage] and not (
                wiring.keep_inputs or wiring.ends or wiring.first[tick, stage]
            )
            if wiring.first[tick, stage] and not wiring.ends:
                x = ("activation", m, 0)
            elif op == Op.FORWARD or wiring.keep_inputs:
                x = activations[stage][wiring.activation_slot[tick, stage]]
            else:
                x = stash[stage][wiring.stash_slot[tick, stage]]
            if op == Op.FORWARD:
                log[stage, op, x] += 1
                stash[stage][wiring.stash_slot[tick, stage]] = x
                yielded[stage] = (x[0], x[1], x[2] + 1)
                if output_stays:
                    activations[stage][wiring.activation_slot[tick, stage]] = yielded[stage]
                continue
            assert x == stash[stage][wiring.stash_slot[tick, stage]]
            if wiring.last[tick, stage] and not wiring.ends:
                y = activations[stage][wiring.activation_slot[tick, stage]]
                reads = output_stays and op != Op.BACKWARD_WEIGHT
                g = ("cotangent", y and y[1], x[2]) if reads else ("cotangent", m, x[2])
            else:
                g = cotangents[stage][wiring.cotangent_slot[tick, stage]]
            log[stage, op, x, g] += 1
            if op == Op.BACKWARD_INPUT:
                between[stage][wiring.between_slot[tick, stage]] = g
            elif op == Op.BACKWARD_WEIGHT:
                assert between[stage][wiring.between_slot[tick, stage]] == g
            if op != Op.BACKWARD_WEIGHT:
                yielded[stage] = (g[0], g[1], g[2] - 1)
        for stage in range(stages):
            offered = [None, yielded[stage - 1], yielded[(stage + 1) % stages], yielded[stage]]
            for ring, origin, slot in (
                (activations, wiring.store_activation_from, wiring.store_activation_slot),
                (cotangents, wiring.store_cotangent_from, wiring.store_cotangent_slot),
            ):
                for place in range(wiring.arrivals):
                    if origin[tick, stage, place]:
                        ring[stage][slot[tick, stage, place]] = offered[origin[tick, stage, place]]
        if wiring.ends and wiring.ends.loss[tick] >= 0:
            stage = int(wiring.last[tick].argmax())
            kind, m, q = yielded[stage]
            assert (kind, m) == ("activation", wiring.ends.loss[tick])
            cotangents[stage][wiring.ends.loss_slot[tick]] = ("cotangent", m, q - 1)
        if wiring.ends and wiring.ends.pull_embed[tick] >= 0:
            assert yielded[int(wiring.first[tick].argmax())] == ("cotangent", wiring.ends.pull_embed[tick], -1)
    return log


def all_the_work(schedule: Schedule) -> Counter:
    """What `run_on_names` must log: each op once, on its stage, with its own input and its own cotangent."""
    split = (schedule.op == Op.BACKWARD_INPUT).any()
    backwards = (Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT) if split else (Op.BACKWARD,)
    work: Counter = Counter()
    for m in range(schedule.microbatches):
        for q in range(schedule.stages * schedule.chunks):
            x, g = ("activation", m, q), ("cotangent", m, q)
            work[home(schedule, q), Op.FORWARD, x] += 1
            work.update((home(schedule, q), op, x, g) for op in backwards)
    return work


def table(rows: str, stages: int, microbatches: int, chunks: int = 1, placement: str = "loop") -> Schedule:
    """One line per stage, one word per tick: F0, B0, I0, W0, a letter after it for the chunk; a dot is idle."""
    words = [line.split() for line in rows.strip().splitlines()]
    letters = {".": Op.IDLE, "F": Op.FORWARD, "B": Op.BACKWARD, "I": Op.BACKWARD_INPUT, "W": Op.BACKWARD_WEIGHT}
    shape = (len(words[0]), stages)
    op, microbatch, chunk = np.zeros(shape, np.int32), np.full(shape, -1, np.int32), np.full(shape, -1, np.int32)
    for s, line in enumerate(words):
        for t, word in enumerate(line):
            op[t, s] = letters[word[0]]
            if word != ".":
                microbatch[t, s] = int(word[1:].rstrip("abc"))
                chunk[t, s] = "abc".index(word[-1]) if word[-1] in "abc" else 0
    return Schedule("mine", stages, microbatches, chunks, placement, op, microbatch, chunk)


# ---- every schedule can be run


@every_kind
@given(stages=stage_counts, microbatches=microbatch_counts, keep_inputs=st.booleans(), apart=st.booleans())
def test_every_op_reads_its_own_input_and_cotangent_and_runs_once(
    name, chunks, stages, microbatches, keep_inputs, apart
):
    schedule = make_schedule(name, stages, microbatches, chunks)
    check(schedule)
    assert run_on_names(wire(schedule, keep_inputs, apart), schedule.stages) == all_the_work(schedule)


@every_kind
@given(stages=stage_counts, microbatches=microbatch_counts, apart=st.booleans())
def test_evaluation_runs_every_forward_on_its_own_input(name, chunks, stages, microbatches, apart):
    schedule = make_schedule(name, stages, microbatches, chunks)
    wiring = forward_only(schedule, apart)
    room = max(int(wiring.stash_slot.max()), int(wiring.ends.loss_slot.max()) if wiring.ends else 0) + 1
    ran = run_on_names(replace(wiring, stash_slots=room, cotangent_slots=room), stages)
    assert ran == Counter({work: n for work, n in all_the_work(schedule).items() if work[1] == Op.FORWARD})
    assert len(wiring.op) <= 2 * chunks * (microbatches + stages)


@every_kind
@given(stages=stage_counts, microbatches=microbatch_counts, keep_inputs=st.booleans())
def test_rings_have_as_many_slots_as_are_ever_alive_on_one_stage(name, chunks, stages, microbatches, keep_inputs):
    schedule = make_schedule(name, stages, microbatches, chunks)
    wiring = wire(schedule, keep_inputs)
    ticks: dict = {}  # of the ops on each microbatch and virtual stage: the forward, the input gradient, the last
    for t, s in np.argwhere(schedule.op != Op.IDLE).tolist():
        q = int(schedule.virtual_stage(s, schedule.chunk[t, s]))
        ticks.setdefault((int(schedule.microbatch[t, s]), q), []).append(t)
    alive: dict[str, Counter] = {ring: Counter() for ring in ("activation", "cotangent", "stash", "between")}
    for (m, q), own in ticks.items():
        lives = {"stash": (own[0], own[-1])}
        if len(own) == 3:
            lives["between"] = (own[1], own[2])
        if q > 0:
            # without the inputs the last virtual stage keeps its output in the same place, for the loss
            end = own[-1] if keep_inputs else own[1] if q == schedule.virtual_stages - 1 else own[0]
            lives["activation"] = (ticks[m, q - 1][0] + 1, end)
        if q + 1 < schedule.virtual_stages:
            lives["cotangent"] = (ticks[m, q + 1][1] + 1, own[-1])
        for ring, (begin, end) in lives.items():
            alive[ring].update((home(schedule, q), t) for t in range(begin, end + 1))
    for ring, counted in alive.items():
        assert getattr(wiring, f"{ring}_slots") == max(1, *counted.values(), 0), ring


def test_the_last_forward_and_the_first_backward_send_nothing():
    schedule = make_schedule("1f1b", 3, 4)
    wiring = wire(schedule)
    assert (wiring.store_activation_from > 0).sum() == (wiring.store_cotangent_from > 0).sum() == 2 * 4
    assert (wiring.activation_slot[wiring.first] == -1).all()
    assert (wiring.cotangent_slot[wiring.last] == -1).all()


@every_kind
def test_one_stage_sends_everything_to_itself_and_never_waits(name, chunks):
    schedule = make_schedule(name, 1, 5, chunks)
    wiring = wire(schedule)
    assert set(np.unique(wiring.store_activation_from)) <= {0, 3}
    assert bubble(schedule) == 0


def test_loop_messages_arrive_one_of_a_kind_a_tick_and_v_messages_at_most_two():
    assert wire(make_schedule("interleaved_1f1b", 4, 8, 2)).arrivals == 1
    wiring = wire(make_schedule("zero_bubble_v", 4, 8, 2))
    assert wiring.arrivals == 2
    for origin in (wiring.store_activation_from, wiring.store_cotangent_from):
        both = origin[(origin > 0).all(axis=-1)]
        assert len(both) and (both[:, 0] != both[:, 1]).all()  # one tensor comes over a channel in a tick


def test_v_placement_folds_the_model_and_loop_goes_round():
    folded, loop = make_schedule("zero_bubble_v", 3, 3, 2), make_schedule("interleaved_1f1b", 3, 3, 2)
    assert [int(folded.stage_of(q)) for q in range(6)] == [0, 1, 2, 2, 1, 0]
    assert [int(loop.stage_of(q)) for q in range(6)] == [0, 1, 2, 0, 1, 2]
    for schedule in (folded, loop):
        for q in range(6):
            assert schedule.virtual_stage(schedule.stage_of(q), q // 3) == q


# ---- what they cost


@given(stages=st.integers(1, 8), extra=st.integers(0, 20), chunks=st.integers(1, 3))
def test_ticks_are_the_known_formulas_once_there_are_as_many_microbatches_as_stages(stages, extra, chunks):
    m = stages + extra
    assert make_schedule("gpipe", stages, m, chunks).ticks == 2 * (m * chunks + stages - 1)
    assert make_schedule("1f1b", stages, m).ticks == 2 * (m + stages - 1)
    assert make_schedule("1f1b_lockstep", stages, m).ticks == 2 * (m + stages - 1)
    assert make_schedule("interleaved_1f1b", stages, m, chunks + 1).ticks == 2 * (m * (chunks + 1) + stages - 1)
    assert make_schedule("zero_bubble", stages, m).ticks == 3 * m + stages - 1
    more = m + stages
    assert make_schedule("zero_bubble", stages, more, chunks).ticks == 3 * more * chunks + stages - 1
    least = 6 * m + stages - 1
    folded = make_schedule("zero_bubble_v", stages, m, 2).ticks
    assert folded == least if m % stages == 0 else least <= folded < least + stages


def test_bubble_targets_at_8_stages_and_32_microbatches():
    known = (8 - 1) / (32 + 8 - 1)
    for asynchronous in (False, True):
        assert bubble(make_schedule("1f1b", 8, 32), asynchronous=asynchronous) == pytest.approx(known, rel=0.01)
        assert bubble(make_schedule("interleaved_1f1b", 8, 32, 2), asynchronous=asynchronous) <= 0.56 * known
        assert bubble(make_schedule("zero_bubble", 8, 32), asynchronous=asynchronous) <= 0.45 * known
        assert bubble(make_schedule("zero_bubble_v", 8, 32, 2), asynchronous=asynchronous) <= 0.20 * known


@every_kind
@given(stages=stage_counts, microbatches=microbatch_counts, seed=st.integers(0, 2**32 - 1))
def test_both_views_keep_the_order_and_the_asynchronous_is_never_slower(name, chunks, stages, microbatches, seed):
    schedule = make_schedule(name, stages, microbatches, chunks)
    costs = dict(zip(Op, np.random.default_rng(seed).uniform(0.1, 3.0, len(Op)), strict=True))
    busy = schedule.op != Op.IDLE
    work = np.array([costs[Op(int(op))] if op else 0.0 for op in schedule.op.ravel()]).reshape(schedule.op.shape)
    times = []
    for asynchronous in (False, True):
        start, end = op_times(schedule, costs, asynchronous)
        np.testing.assert_allclose((end - start)[busy], work[busy])
        ends = {}
        for t, s in np.argwhere(busy):  # every op starts after its stage's last one and after what it needs
            op, m = int(schedule.op[t, s]), int(schedule.microbatch[t, s])
            q = int(schedule.virtual_stage(s, schedule.chunk[t, s]))
            kind = "F" if op == Op.FORWARD else "W" if op == Op.BACKWARD_WEIGHT else "B"
            needs = {"F": [("F", m, q - 1)], "B": [("F", m, q), ("B", m, q + 1)], "W": [("B", m, q)]}[kind]
            assert start[t, s] >= max([ends.get(need, 0.0) for need in [*needs, ("stage", s)]]) - 1e-9
            ends[kind, m, q] = ends["stage", s] = end[t, s]
        times.append(step_time(schedule, costs, asynchronous))
        total = work.sum()
        assert bubble(schedule, costs, asynchronous) == pytest.approx(1 - total / (schedule.stages * times[-1]))
    assert work.sum(axis=0).max() <= times[1] + 1e-9 <= times[0] + 2e-9
    assert step_time(schedule) == schedule.ticks


@given(stages=st.integers(1, 8), m=st.integers(1, 24), forward=st.floats(0.1, 2), backward=st.floats(0.1, 4))
def test_1f1b_takes_the_same_time_at_its_own_pace_as_1f1b_lockstep_in_step(stages, m, forward, backward):
    costs = {Op.FORWARD: forward, Op.BACKWARD: backward}
    known = (m + stages - 1) * (forward + backward)
    assert step_time(make_schedule("1f1b", stages, m), costs, asynchronous=True) == pytest.approx(known)
    assert step_time(make_schedule("1f1b_lockstep", stages, m), costs) == pytest.approx(known)


@given(stages=st.integers(1, 8), m=st.integers(1, 40))
def test_stash_of_1f1b_and_its_like_does_not_grow_with_microbatches_and_that_of_gpipe_does(stages, m):
    left = stages - np.arange(stages)
    assert peak_stash(make_schedule("1f1b", stages, m)).tolist() == np.minimum(m, left).tolist()
    assert (peak_stash(make_schedule("1f1b_lockstep", stages, m)) <= np.minimum(m, 2 * left)).all()
    assert (peak_stash(make_schedule("gpipe", stages, m)) == m).all()
    assert peak_stash(make_schedule("zero_bubble", stages, m)).max() <= min(m, stages)
    assert peak_stash(make_schedule("zero_bubble_v", stages, m, 2)).max() <= min(2 * m, 2 * stages + 2)
    if m % stages == 0:
        interleaved = peak_stash(make_schedule("interleaved_1f1b", stages, m, 2))
        assert (interleaved <= 3 * stages - 2 * np.arange(stages)).all()


@pytest.mark.parametrize(("name", "chunks"), [kind for kind in KINDS if kind[0] != "gpipe"])
def test_rings_do_not_grow_from_16_to_64_microbatches(name, chunks):
    def rings(microbatches: int) -> tuple[int, ...]:
        wiring = wire(make_schedule(name, 4, microbatches, chunks))
        return wiring.activation_slots, wiring.cotangent_slots, wiring.stash_slots

    assert rings(16) == rings(64)


def test_1f1b_messages_are_used_in_the_tick_after_they_were_sent():
    assert peak_messages(make_schedule("1f1b", 4, 16)).tolist() == [1, 1, 1, 1]
    # Chunk 1 of microbatch 0 reaches stage 0 after 4 ticks and waits there until all 16 have been through chunk 0.
    assert peak_messages(make_schedule("gpipe", 4, 16, 2)).tolist() == [13, 1, 1, 13]


def test_costs_must_name_every_op_that_occurs():
    with pytest.raises(UserError, match=r"uses BACKWARD, but costs .* add costs\[Op.BACKWARD\]"):
        bubble(make_schedule("1f1b", 2, 2), {Op.FORWARD: 1.0})


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("gpip", 2, 2), "no pipeline schedule named 'gpip': choose one of gpipe, 1f1b"),
        (("1f1b", 0, 2), "stages must be a whole number of at least 1, not 0"),
        (("1f1b", 2, 2.0), "microbatches must be a whole number of at least 1, not 2.0"),
        (("1f1b", 2, 2, 2), "1f1b has one chunk per stage, not 2: set chunks=1, or use interleaved_1f1b"),
        (("interleaved_1f1b", 2, 2), "needs at least two chunks per stage: set chunks=2, or use 1f1b"),
        (("zero_bubble_v", 2, 2, 4), "into two chunks per stage, not 4: set chunks=2"),
    ],
)
def test_a_schedule_that_cannot_be_made_is_refused(arguments, sentence):
    with pytest.raises(UserError, match=sentence):
        make_schedule(*arguments)


# ---- bad tables


BAD_TABLES = {
    "no backward": (
        ("F0 . . B0", ". F0 . .", 2, 1),
        "tick 1, stage 1, forward of microbatch 0, chunk 0 has no backward or backward input to go with it: add one",
    ),
    "no weight gradient": (
        ("F0 . . I0", ". F0 I0 W0", 2, 1),
        "tick 0, stage 0, forward of microbatch 0, chunk 0 has no backward or backward weight to go with it: add one",
    ),
    "no forward": (
        ("F0 . . B0", ". . B0 .", 2, 1),
        "tick 2, stage 1, backward of microbatch 0, chunk 0 has no forward",
    ),
    "nothing of a microbatch": (
        ("F0 . . B0", ". F0 B0 .", 2, 2),
        "stage 0 has no forward of microbatch 1, chunk 0: add one, or correct the table's 2 microbatches and 1 chunks",
    ),
    "twice": (
        ("F0 . . B0 B0", ". F0 B0 . .", 2, 1),
        "tick 4, stage 0, backward of microbatch 0, chunk 0 does again what tick 3, stage 0, backward",
    ),
    "backward whole and in parts": (
        ("F0 . . B0 W0", ". F0 B0 . .", 2, 1),
        "tick 4, stage 0, backward weight of microbatch 0, chunk 0 does again what tick 3, stage 0, backward",
    ),
    "forward too early": (
        ("F0 . . B0", "F0 . B0 .", 2, 1),
        "tick 0, stage 1, forward of microbatch 0, chunk 0 needs what tick 0, stage 0, forward of microbatch 0, "
        "chunk 0 makes, which can be used from tick 1 on: move it there or later",
    ),
    "backward too early": (
        ("F0 . B0", ". F0 B0", 2, 1),
        "tick 2, stage 0, backward of microbatch 0, chunk 0 needs what tick 2, stage 1, backward .* from tick 3 on",
    ),
    "backward before its forward": (
        ("B0 F0", None, 1, 1),
        "tick 0, stage 0, backward of microbatch 0, chunk 0 needs what tick 1, stage 0, forward",
    ),
    "weight before input gradient": (
        ("F0 W0 I0", None, 1, 1),
        "tick 1, stage 0, backward weight of microbatch 0, chunk 0 needs what tick 2, stage 0, backward input",
    ),
    "circle": (
        ("F0 . . B0 F1 . . B1", ". . F1 F0 B0 B1 . .", 2, 2),
        "circle .*tick 3, stage 0, backward of microbatch 0, chunk 0 waits for tick 4, stage 1, backward.*"
        "tick 2, stage 1, forward of microbatch 1, chunk 0 waits for tick 4, stage 0, forward of microbatch 1",
    ),
    "microbatch out of range": (
        ("F1 . . B1", ". F0 B0 .", 2, 1),
        "tick 0, stage 0, forward of microbatch 1, chunk 0 is out of range: microbatch goes from 0 to 0",
    ),
    "chunk out of range": (
        ("F0b B0b", None, 1, 1),
        "tick 0, stage 0, forward of microbatch 0, chunk 1 is out of range: chunk goes from 0 to 0",
    ),
}


@pytest.mark.parametrize("case", BAD_TABLES)
def test_a_bad_table_is_refused_with_tick_stage_op_and_reason(case):
    (first, second, stages, microbatches), sentence = BAD_TABLES[case]
    with pytest.raises(UserError, match=f"^schedule mine: .*{sentence}") as refusal:
        check(table(first if second is None else f"{first}\n{second}", stages, microbatches))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"stages": 0}, "stages is 0, but must be a whole number"),
        ({"placement": "ring"}, "placement is 'ring', but must be one of loop, v"),
        ({"stages": 3}, r"the op table has shape \(6, 2\), but must be \[ticks, 3 stages\]"),
        ({"op": np.full((6, 2), 1.0)}, "the op table holds float64 values, but must hold whole numbers"),
        ({"op": np.full((6, 2), 5)}, "tick 0, stage 0 has op 5, but ops are 0 to 4"),
        ({"op": np.zeros((6, 2), np.int32)}, "tick 0, stage 0 is idle, so its microbatch must be -1, not 0"),
    ],
)
def test_a_malformed_table_is_refused(change, sentence):
    with pytest.raises(UserError, match=sentence):
        check(replace(make_schedule("1f1b", 2, 2), **change))


def possible(schedule: Schedule) -> bool:
    """Whether a table can be run, found by running it: an op can if what it needs was made in the ticks before."""
    makes = {Op.FORWARD: ["F"], Op.BACKWARD: ["G", "W"], Op.BACKWARD_INPUT: ["G"], Op.BACKWARD_WEIGHT: ["W"]}
    made: list = []
    for t in range(schedule.ticks):
        now = []
        for s in np.flatnonzero(schedule.op[t]):
            op, m, chunk = (int(a[t, s]) for a in (schedule.op, schedule.microbatch, schedule.chunk))
            here = range(chunk * schedule.stages, (chunk + 1) * schedule.stages)
            q = next(q for q in here if home(schedule, q) == s)
            if op == Op.FORWARD:
                needs = [("F", m, q - 1)] if q else []
            elif op == Op.BACKWARD_WEIGHT:
                needs = [("G", m, q)]
            else:
                needs = [("F", m, q)] + ([("G", m, q + 1)] if q + 1 < schedule.virtual_stages else [])
            if not set(needs) <= set(made):
                return False
            now += [(kind, m, q) for kind in makes[Op(op)]]
        made += now
    places = [(m, q) for m in range(schedule.microbatches) for q in range(schedule.virtual_stages)]
    return sorted(made) == sorted((kind, m, q) for kind in "FGW" for m, q in places)


@every_kind
@given(stages=st.integers(1, 3), microbatches=st.integers(1, 4), data=st.data())
def test_check_refuses_a_damaged_table_exactly_when_it_cannot_be_run(name, chunks, stages, microbatches, data):
    schedule = make_schedule(name, stages, microbatches, chunks)
    cells = [a.copy() for a in (schedule.op, schedule.microbatch, schedule.chunk)]
    stage = data.draw(st.integers(0, schedule.stages - 1))
    one, two = data.draw(st.tuples(*[st.integers(0, schedule.ticks - 1)] * 2))
    damage = data.draw(st.sampled_from(["swap", "copy", "erase", "delay"]))
    for a, fill in zip(cells, (0, -1, -1), strict=True):
        if damage == "swap":
            a[[one, two], stage] = a[[two, one], stage]
        elif damage == "copy":
            a[one, stage] = a[two, stage]
        elif damage == "erase":
            a[one, stage] = fill
        else:  # all that one stage does from a tick on happens a tick later; a last op is lost unless it is idle
            a[one:, stage] = np.concatenate([[fill], a[one:-1, stage]])
    damaged = replace(schedule, op=cells[0], microbatch=cells[1], chunk=cells[2])
    if possible(damaged):
        check(damaged)
        assert run_on_names(wire(damaged), schedule.stages) == all_the_work(damaged)
    else:
        with pytest.raises(UserError, match=r"stage \d"):
            check(damaged)


@every_kind
@given(stages=st.integers(1, 4), microbatches=st.integers(1, 6), keep_inputs=st.booleans(), data=st.data())
def test_check_wiring_refuses_a_changed_entry_exactly_when_an_op_would_read_something_else(
    name, chunks, stages, microbatches, keep_inputs, data
):
    schedule = make_schedule(name, stages, microbatches, chunks)
    wiring = wire(schedule, keep_inputs)
    ring = data.draw(st.sampled_from(["activation", "cotangent", "stash"]))
    fields = [f"{ring}_slot"] + ([] if ring == "stash" else [f"store_{ring}_slot", f"store_{ring}_from"])
    field = data.draw(st.sampled_from(fields))
    entries = getattr(wiring, field).copy()
    used = np.argwhere(entries > 0 if field.endswith("from") else entries >= 0)
    if len(used) == 0:
        return
    highest = 3 if field.endswith("from") else getattr(wiring, f"{ring}_slots") - 1
    entries[tuple(data.draw(st.sampled_from(used.tolist())))] = data.draw(st.integers(0, highest))
    changed = replace(wiring, **{field: entries})
    try:
        right = run_on_names(changed, schedule.stages) == all_the_work(schedule)
    except (AssertionError, IndexError, TypeError):  # the last two: an op that read an empty slot or garbage
        right = False
    if right:
        check_wiring(schedule, changed)
    else:
        with pytest.raises(UserError, match=r"tick \d+, stage \d+.*(slot \d+|of stage \d+, which sends)"):
            check_wiring(schedule, changed)


def test_a_slot_clash_is_refused_with_what_is_still_wanted():
    schedule = make_schedule("1f1b", 4, 6)
    wiring = wire(schedule)
    slots = np.where(wiring.store_activation_slot >= 0, 0, -1).astype(np.int32)
    with pytest.raises(
        UserError,
        match="tick 2, stage 0, forward of microbatch 1, chunk 0: the activation it sends to stage 1 is to go to "
        "activation slot 0, where microbatch 0, chunk 0 is still wanted",
    ):
        check_wiring(schedule, replace(wiring, store_activation_slot=slots))


def test_storing_from_a_stage_that_sends_nothing_is_refused():
    schedule = make_schedule("1f1b", 3, 3)
    wiring = wire(schedule)
    origin = wiring.store_activation_from.copy()
    assert origin[0, 1, 0] == 1
    origin[0, 1, 0] = 2
    with pytest.raises(UserError, match="tick 0, stage 1 is to store the activation of stage 2, which sends nothing"):
        check_wiring(schedule, replace(wiring, store_activation_from=origin))
