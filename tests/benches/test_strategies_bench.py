"""Resident experts against fully sharded weights: rows that can be compared, bytes that follow from what moves.

tiny model on four devices --bench strategies --json--> rows; scripted times -> where the two meet
"""

import json

import pytest

from moejax import bench
from moejax.benches.strategies import meeting
from moejax.errors import UserError

TINY = ("model.n_layers=2", "model.n_dense_layers=0", "model.vocab_size=288", "model.moe.num_experts=16")
KEYS = {"strategy", "bytes_per_token", "peak_bytes", "tokens_per_s", "ratio", "tokens", "meet_tokens"}


@pytest.mark.slow
def test_both_strategies_are_measured_on_the_same_batch(tmp_path):
    target = tmp_path / "rows.json"
    arguments = ["strategies", "--mesh", "ep=4", "--tokens", "128", "--turns", "1", *TINY]
    assert bench.main([*arguments, "--json", str(target)]) == 0
    fsdp, resident = json.loads(target.read_text())["rows"]
    assert (fsdp["strategy"], resident["strategy"]) == ("fsdp", "resident")
    assert all(KEYS <= row.keys() and row["tokens"] == 128 and row["tokens_per_s"] > 0 for row in (fsdp, resident))
    assert fsdp["ratio"] == 1 and resident["ratio"] > 0 and resident["meet_tokens"] is None
    assert 0 < resident["bytes_per_token"] < fsdp["bytes_per_token"] / 2
    assert min(fsdp["peak_bytes"], resident["peak_bytes"]) > 0


def test_where_two_lines_meet():
    tokens = [100, 200, 400]
    resident = [1 + 0.03 * n for n in tokens]
    assert meeting(tokens, [4 + 0.02 * n for n in tokens], resident) == pytest.approx(300), "between two batches"
    assert meeting(tokens, [7 + 0.02 * n for n in tokens], resident) == pytest.approx(600), "beyond the last"
    assert meeting(tokens, [7 + 0.04 * n for n in tokens], resident) is None, "they draw apart"
    assert meeting([100], [1.0], [2.0]) is None


def test_bad_arguments_are_told_in_a_sentence():
    with pytest.raises(UserError, match="twice"):
        bench.main(["strategies", "--tokens", "128,128"])
    with pytest.raises(UserError, match="train.batch_tokens"):
        bench.main(["strategies", "--tokens", "100"])
