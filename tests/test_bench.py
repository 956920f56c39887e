"""The bench command: what it measures is told apart from what the machine does, and what it writes can be read.

scripted clock -> interleaved; small benchmarks -> main --json -> rows; bad arguments -> one sentence, exit code 2
"""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from moejax import bench
from moejax.accounting import parameter_counts
from moejax.benches import _interleave, experts
from moejax.benches._interleave import interleaved
from moejax.errors import UserError
from tests.small import SETTINGS, small_config

ROOT = Path(__file__).resolve().parents[1]
SMALL = [setting for setting in SETTINGS if not setting.startswith(("model.moe.num_experts", "train.batch_tokens"))]
ROW_KEYS = {"experts", "active_params", "total_params", "tokens_per_s"}


def test_a_machine_that_slows_down_does_not_change_the_ratio(monkeypatch):
    """The second call takes half the time of the first in every turn, while the machine gets ten times slower."""
    clock = SimpleNamespace(now=0.0, calls=[])
    monkeypatch.setattr(_interleave.time, "perf_counter", lambda: clock.now)

    def work(name: str, seconds: float):
        def call():
            clock.calls.append(name)
            clock.now += seconds * (1 if len(clock.calls) < 10 else 10)

        return call

    timings = interleaved({"slow": work("slow", 2.0), "fast": work("fast", 1.0)}, turns=8)
    assert timings["slow"].ratio == 1.0
    assert timings["fast"].ratio == pytest.approx(2.0)
    assert timings["fast"].spread > 1.0  # and it says that the machine was not quiet
    turns = np.array(clock.calls[2:]).reshape(8, 2)
    assert all(set(turn) == {"slow", "fast"} for turn in turns), "every turn runs everything"
    assert sum(turn[0] == "slow" for turn in turns) == 4, "nobody is always first"


@pytest.mark.slow
def test_the_timed_step_gives_the_gradients_of_the_train_step():
    config = small_config()
    call = experts.step_of(config, seed=3)
    once = jax.tree.map(np.array, call()[0])  # a copy, since the next call overwrites it
    again = call()[0]
    jax.tree.map(np.testing.assert_array_equal, once, jax.tree.map(np.asarray, again))
    largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(once))
    assert 0 < largest < np.inf


@pytest.mark.slow
def test_experts_holds_the_active_parameters(tmp_path, capsys):
    """Twice the experts are twice the experts' weights in all; per token only the router grows."""
    target = tmp_path / "rows.json"
    arguments = ["experts", "--experts", "4,8", "--tokens", "128", "--turns", "1", *SMALL, "--json", str(target)]
    assert bench.main([*arguments, "parallel.pipeline.microbatches=2"]) == 0
    written = json.loads(target.read_text())
    few, many = written["rows"]
    assert (few["experts"], many["experts"]) == (4, 8) and few["ratio"] == 1.0
    assert ROW_KEYS <= few.keys() and min(few["tokens_per_s"], many["tokens_per_s"]) > 0
    model = small_config().model
    router = model.n_moe_layers * model.d_model * 4
    assert many["active_params"] - few["active_params"] == router
    counts = parameter_counts(model)
    assert many["total_params"] == counts.total
    assert many["total_params"] - few["total_params"] == router + 4 * model.n_moe_layers * 3 * 32 * 32
    assert written["bench"] == "experts" and {"cpu", "cores", "jax", "date", "platform"} <= written["machine"].keys()
    assert "tokens_per_s" in capsys.readouterr().out


def test_grouped_gemm_writes_a_row_per_direction(tmp_path):
    target = tmp_path / "rows.json"
    sizes = ["--rows", "64", "--width", "8", "--hidden", "16", "--repeats", "1"]
    assert bench.main(["grouped-gemm", "--groups", "2,3", *sizes, "--json", str(target)]) == 0
    rows = json.loads(target.read_text())["rows"]
    assert [row["groups"] for row in rows] == [2, 2, 2, 3, 3, 3]
    assert all({"rows", "dense_ratio", "ragged_dot_speedup"} <= row.keys() and row["rows"] == 64 for row in rows)
    assert all(row["max_abs_error"] < 1e-3 for row in rows)


def test_every_benchmark_says_what_it_is(capsys):
    with pytest.raises(SystemExit) as stop:
        bench.main(["--help"])
    listed = capsys.readouterr().out
    assert stop.value.code == 0
    for name, module in bench.benchmarks().items():
        assert name in listed and bench.first_line(module) in listed
        with pytest.raises(SystemExit):
            bench.main([name, "--help"])
        assert "--json" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["expert"], "experts"),
        (["experts", "--experts", "8,many"], "8,32,128"),
        (["experts", "--experts", "8,8"], "twice"),
        (["experts", "--turns", "0"], "turns"),
        (["experts", "--tokens", "100"], "train.batch_tokens"),
        (["experts", "model.d_modle=8"], "model.d_model"),
        (["grouped-gemm", "--rows", "0"], "at least 1"),
        (["grouped-gemm", "--implementation", "magic"], "magic"),
        (["grouped-gemm", "--json", "/nowhere/rows.json"], "/nowhere"),
    ],
)
def test_bad_arguments_are_told_in_a_sentence(arguments, words):
    with pytest.raises(UserError, match=words) as told:
        bench.main(arguments)
    assert "\n" not in str(told.value) and str(told.value).endswith((".", "?"))


def test_bad_input_leaves_with_code_2_and_no_traceback():
    command = [sys.executable, "-m", "moejax.bench", "expert"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


def test_a_table_says_what_is_the_same_only_once():
    rows = [{"experts": 8, "seed": 0, "ratio": 1.0}, {"experts": 128, "seed": 0, "ratio": 0.93215}]
    table = bench.table("experts", rows)
    assert [column.header for column in table.columns] == ["experts", "ratio"] and table.caption == "seed 0"
