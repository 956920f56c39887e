"""The plan command plans, searches and draws what was asked for, and refuses in one sentence what it cannot."""

import json
import sys
from pathlib import Path

import pytest

from moejax.errors import UserError
from moejax.parallel.schedule_csv import to_csv
from moejax.parallel.schedule_makers import make_schedule
from moejax.plan import main

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
TINY = ["--config", str(CONFIGS / "tiny_64e.yaml"), "--quick"]


def test_several_schedules_come_as_text_and_in_one_picture(tmp_path, capsys):
    to_csv(make_schedule("1f1b", 2, 3), tmp_path / "mine.csv")
    picture = tmp_path / "all.svg"
    wanted = f"gpipe,interleaved_1f1b:3,{tmp_path / 'mine.csv'}"
    code = main(
        [
            "--mesh",
            "pp=2",
            "--schedule",
            wanted,
            "--svg",
            str(picture),
            "--costs",
            "F=1,B=2",
            "parallel.pipeline.microbatches=4",
        ]
    )
    said, drawn = capsys.readouterr().out, picture.read_text()
    assert code == 0
    for caption in (
        "gpipe: 2 stages, 4 microbatches",
        "interleaved_1f1b: 2 stages, 4 microbatches, 3 chunks",
        "1f1b: 2 stages",
    ):
        assert caption in said and caption in drawn
    assert said.count("bubble") == 3 and said.count("peak stash") == 3


def test_without_names_the_schedule_is_the_config_s(tmp_path, capsys):
    main(["--mesh", "pp=4", "--svg", str(tmp_path / "p.svg"), "parallel.pipeline.schedule=zero_bubble_v"])
    assert "zero_bubble_v: 4 stages" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--schedule", "2f2b"], "no pipeline schedule named '2f2b'"),
        (["--schedule", "gpipe:two"], "whole number"),
        (["--schedule", "absent.csv"], "absent.csv"),
        (["--costs", "F=one"], "F=1,B=2"),
        (["--costs", "F=1"], "BACKWARD"),
        (["--svg", "/no/such/folder/p.svg"], "cannot be written"),
    ],
)
def test_bad_wishes_are_refused(arguments, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text("model: {n_layers: 4}\n")
    with pytest.raises(UserError, match=words):
        main(["--config", "c.yaml", "--mesh", "pp=2", *arguments])


def test_a_quick_plan_says_whether_it_fits_and_writes_data(tmp_path, capsys):
    file = tmp_path / "plan.json"
    rates = ["--tokens-per-second", "52000,19400"]
    assert (
        main([*TINY, "--config", str(CONFIGS / "moe_8l_128e.yaml"), "--gpu", "b300", *rates, "--json", str(file)]) == 0
    )
    said, data = capsys.readouterr().out, json.loads(file.read_text())
    assert said.startswith("Fits:")
    assert "946 TFLOP/s" in said and "353 TFLOP/s" in said
    assert data["verdict"]["fits"] and data["source"] == "quick"
    assert data["model"]["parameters_total"] / 1e9 == pytest.approx(46.863, abs=5e-4)
    assert data["model"]["flops_per_token_total"] / 1e9 == pytest.approx(18.192, abs=5e-4)


def test_a_plan_that_does_not_fit_says_how_many_gpus_would_do(capsys):
    assert main([*TINY, "--config", str(CONFIGS / "moe_8l_128e.yaml"), "--gpu", "h100", "--mesh", "ep=8"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert said.startswith("Does not fit:") and "GB too much" in said
    assert "The smallest number of these GPUs that would do is" in said or "--search finds it" in said


def test_a_search_prints_candidates_and_why(tmp_path, capsys):
    file = tmp_path / "plan.json"
    assert (
        main([*TINY, "--gpu", "h200", "--gpus", "8", "--search", "--json", str(file), "train.batch_tokens=1048576"])
        == 0
    )
    rows = json.loads(file.read_text())["search"]
    assert len(rows) >= 5
    assert not rows[0]["reason"] and all(row["reason"] for row in rows[1:])
    assert "To train so: --mesh" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--gpu", "b999"], "no file for a GPU 'b999'; the ones known are b200, b300, h100, h200"),
        (["--gpu", "absent.yaml"], "no file for a GPU 'absent.yaml'"),
        (["--mesh", "ep=8", "--gpus", "512"], "is for 8 GPUs and there are 512"),
        (["--mesh", "ep=8", "--nodes", "2"], "is for 8 GPUs and there are 16"),
        (["--mesh", "ep=8", "--nodes", "2", "--gpus", "8"], "disagree"),
        (["--mesh", "ep=7"], "does not fit: ep=7 does not divide"),
        (["--mesh", "dp=8", "parallel.strategy=fsdp"], "knows parallel.strategy=resident"),
        (["--attained", "compute=2"], "shares above 0 and up to 1"),
        (["--json", "/no/such/folder/plan.json"], "cannot be written"),
        (
            ["--gpus", "1", "--search", "--config", str(CONFIGS / "medium_64e.yaml")],
            "the smallest number of these GPUs",
        ),
    ],
)
def test_bad_plans_are_refused(arguments, words):
    with pytest.raises(UserError, match=words) as error:
        main([*TINY, *arguments])
    assert "\n" not in str(error.value)


def test_a_quick_plan_needs_no_training_code(monkeypatch):
    """A second, not ten: what a quick plan imports leaves out the optimizer and the modules of the network."""
    import subprocess

    code = (
        "import sys; from moejax import plan; "
        "print([name for name in ('optax', 'orbax', 'moejax.parallel.step', 'moejax.trainer') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
