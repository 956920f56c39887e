"""The study of overlap: what it cannot compile it says; with a compiler, bytes do not depend on the schedule.

a small layer --bench overlap, in a process of its own--> rows of every variant
"""

import json

import pytest

from moejax import bench
from moejax.errors import UserError
from moejax.hardware.absent_gpu import missing
from tests.absent import needs_compiler, own_process


@needs_compiler
@pytest.mark.slow
def test_the_schedule_moves_work_and_not_bytes(tmp_path):
    target = tmp_path / "rows.json"
    sizes = ["--tokens", "256", "--experts", "16", "--width", "256", "--hidden", "256", "--json", str(target)]
    own_process("-m", "moejax.bench", "overlap", *sizes)
    rows = json.loads(target.read_text())["rows"]
    assert {(row["scheduler"], row["shared"]) for row in rows} == {
        (scheduler, shared) for scheduler in ("off", "on") for shared in ("before", "free", "after")
    }
    assert len({row["bytes"] for row in rows}) == 1 and all(row["overlapped_bytes"] <= row["bytes"] for row in rows)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["--experts", "9"], "does not divide"), (["--experts", "8", "--top-k", "9"], "more than --experts")],
)
def test_bad_arguments_are_told_in_a_sentence(arguments, words):
    with pytest.raises(UserError, match=words):
        bench.main(["overlap", *arguments])


@pytest.mark.skipif(missing() is None, reason="the compiler is there")
def test_without_the_compiler_the_way_out_is_said():
    with pytest.raises(UserError, match="moejax\\[aot\\]"):
        bench.main(["overlap"])
