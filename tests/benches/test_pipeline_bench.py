"""The pipeline benchmark's arithmetic, and that its rows have what the issue of the day reads from them."""

import argparse

import pytest

from moejax.benches import pipeline as bench
from moejax.errors import UserError
from moejax.parallel.schedule_makers import make_schedule
from moejax.parallel.schedules import Op, bubble, step_time


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return parser.parse_args(words)


@pytest.mark.parametrize(
    ("schedule", "stash", "ratio"),
    [
        ("1f1b", "residuals", 1.0),
        ("1f1b", "inputs", (3 / 4 + 3) / 3),  # of four forwards the last runs inside its backward alone
        ("zero_bubble", "residuals", 1.0),
        ("zero_bubble", "inputs", (3 / 4 + 5) / 3),
        ("1f1b", "named", 4 / 3),
    ],
)
def test_flops_are_those_of_the_ops_that_run(schedule, stash, ratio):
    config = bench.case_config(arguments(), schedule, stash, "switch")
    assert bench.recompute_flops_ratio(make_schedule(schedule, 4, 8), config) == pytest.approx(ratio)


def test_keeping_residuals_is_what_makes_a_split_backward_pay():
    whole, split = make_schedule("1f1b_lockstep", 8, 32), make_schedule("zero_bubble", 8, 32)
    time = lambda schedule, stash: step_time(schedule, bench.op_costs(schedule, stash))  # noqa: E731
    assert time(split, "residuals") < time(whole, "residuals")
    assert time(split, "inputs") > time(whole, "inputs")
    assert bubble(split, {op: 1.0 for op in Op}) < bubble(whole)


@pytest.mark.slow
def test_a_row_has_the_figures():
    words = ("--schedules", "1f1b", "--stashes", "inputs", "--modes", "switch", "--stages", "2", "--microbatches", "2")
    small = ("model.d_model=32", "model.n_layers=2", "data.sequence_length=16")
    (row,) = bench.run(arguments(*words, "--turns", "1", *small))
    assert row["schedule"] == "1f1b" and row["stages"] == 2 and row["microbatches"] == 2
    assert row["temp_bytes"] > 0 and row["seconds"] > 0
    assert row["bubble_table"] == pytest.approx(
        bubble(make_schedule("1f1b", 2, 2), bench.op_costs(make_schedule("1f1b", 2, 2), "inputs"))
    )
    assert row["bubble_measured"] < 1


def test_an_odd_number_of_microbatches_is_refused():
    with pytest.raises(UserError, match="even"):
        bench.run(arguments("--microbatches", "3"))
