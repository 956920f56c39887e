"""Schedules in CSV files: what is written is read back, and a bad file is refused with its line or op and why."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moejax.errors import UserError
from moejax.parallel.schedule_csv import load_csv, to_csv
from moejax.parallel.schedule_makers import make_schedule
from moejax.parallel.schedules import Op


@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("interleaved_1f1b", 3), ("zero_bubble_v", 2)])
@given(stages=st.integers(1, 8), microbatches=st.integers(1, 8))
def test_a_schedule_written_to_a_file_and_read_back_is_the_same(name, chunks, stages, microbatches, tmp_path_factory):
    schedule = make_schedule(name, stages, microbatches, chunks)
    path = tmp_path_factory.mktemp("csv") / "table.csv"
    to_csv(schedule, path)
    again = load_csv(path)
    for field in ("name", "stages", "microbatches", "chunks", "placement"):
        assert getattr(again, field) == getattr(schedule, field)
    for field in ("op", "microbatch", "chunk"):
        np.testing.assert_array_equal(getattr(again, field), getattr(schedule, field), strict=True)


def test_a_file_by_hand_may_have_its_lines_and_columns_in_any_order_and_short_names(tmp_path):
    path = tmp_path / "by_hand.csv"
    path.write_text('\ufeffstage, tick, op, chunk, microbatch\n\n0,1,b,0,0\n0,0,"F",0,0\n', encoding="utf-8")
    schedule = load_csv(path)
    assert (schedule.name, schedule.placement, schedule.ticks) == ("by_hand", "loop", 2)
    assert schedule.op.tolist() == [[Op.FORWARD], [Op.BACKWARD]]


GOOD = "0,0,F,0,0\n1,0,B,0,0\n"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "has no ops: give the header tick,stage,op,microbatch,chunk and one line per op"),
        (
            "tick,stage,op\n",
            "line 1: the header must name the columns tick, stage, op, microbatch, chunk, not tick",
        ),
        ("HEADER0,0,F,0\n", "line 2: 4 values for 5 columns"),
        ("HEADER0,0,F,x,0\n", "line 2: microbatch 'x' of tick 0, stage 0, op F is not a whole number"),
        ("HEADER0.5,0,F,0,0\n", "line 2: tick '0.5' of tick 0.5, stage 0, op F is not a whole number"),
        ("HEADER0,-1,F,0,0\n", "line 2: stage '-1' of tick 0, stage -1, op F is out of range"),
        ("HEADER0,0,F,99999999999,0\n", "line 2: microbatch '99999999999' of tick 0, stage 0, op F is out of range"),
        (
            f"HEADER{GOOD}2,0,F,7,0\n",
            "line 4: tick 2, stage 0, forward of microbatch 7, chunk 0 is out of range for a file",
        ),
        ("HEADER0,0,F,0,0\n2000000000,0,B,0,0\n", "spans 2000000001 ticks on 1 stages"),
        ("HEADER0,0,G,0,0\n", "line 2: tick 0, stage 0 has op 'G': use one of forward, backward"),
        (
            f"HEADER{GOOD}1,0,W,0,0\n",
            "line 4: tick 1, stage 0 is already taken by the backward of microbatch 0, chunk 0",
        ),
        ("HEADER0,0,F,0,0\n", "tick 0, stage 0, forward of microbatch 0, chunk 0 has no backward"),
        (
            "HEADER0,0,B,0,0\n1,0,F,0,0\n",
            "tick 0, stage 0, backward of microbatch 0, chunk 0 needs what tick 1, stage 0",
        ),
        (f"# placement: u\nHEADER{GOOD}", "placement is 'u', but must be one of loop, v"),
    ],
)
def test_a_bad_file_is_refused_with_the_line_or_the_op(text, sentence, tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text(text.replace("HEADER", "tick,stage,op,microbatch,chunk\n"))
    with pytest.raises(UserError) as refusal:
        load_csv(path)
    assert sentence in str(refusal.value) and "\n" not in str(refusal.value)


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(UserError, match="cannot read the pipeline schedule .*none.csv: No such file"):
        load_csv(tmp_path / "none.csv")
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="it is not UTF-8 text"):
        load_csv(tmp_path / "binary.csv")
