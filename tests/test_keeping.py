"""Which checkpoints a run keeps, what it does about a damaged one, and where a new run takes its weights from."""

import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from moejax import config_io
from moejax.checkpoint.manager import Checkpoints
from moejax.checkpoint.saved_model import SavedModel
from moejax.errors import UserError
from moejax.observe.jsonl import read_metrics
from moejax.trainer import Trainer
from tests.runs import main, run_arguments, what_was_learnt

SHORT = ("train.steps=4", "checkpoint.every=2", "train.eval_batches=0", "data.validation_fraction=0")


def folder_of(arguments: list[str]) -> Path:
    config = config_io.load(None, arguments)
    return Path(config.run.dir) / config.run.name


def steps_kept(folder: Path) -> set[int]:
    return set(Checkpoints(folder / "checkpoints").steps())


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Arguments of a run with checkpoints of steps 2 and 4."""
    arguments = run_arguments(tmp_path_factory.mktemp("trained"), *SHORT)
    assert main(arguments) == 0
    return arguments


@pytest.fixture
def copied(trained: list[str], tmp_path: Path) -> list[str]:
    """The same over a copy of its folder."""
    shutil.copytree(folder_of(trained), tmp_path / "runs" / "small")
    return [*trained, f"run.dir={tmp_path / 'runs'}"]


def test_the_newest_the_regular_and_the_best_are_kept(tmp_path):
    # a learning rate that is far too large: the loss is lowest early on
    arguments = run_arguments(
        tmp_path,
        *("train.steps=8", "checkpoint.every=1", "train.eval_batches=0", "data.validation_fraction=0"),
        *("checkpoint.keep=1", "checkpoint.keep_every=3", "checkpoint.best=loss", "optimizer.learning_rate=1"),
    )
    assert main(arguments) == 0
    folder = folder_of(arguments)
    losses = {record["step"]: record["loss"] for record in read_metrics(folder)}
    best = min(losses, key=lambda step: losses[step])
    assert best not in (3, 6, 8), losses
    assert steps_kept(folder) == {best, 3, 6, 8}
    for step in steps_kept(folder):
        record = Checkpoints(folder / "checkpoints").read_record(step)
        assert record["metrics"] == {"loss": losses[step], "held_out_loss": None}


def test_best_by_held_out_loss_needs_an_evaluation_at_every_save(tmp_path):
    arguments = run_arguments(tmp_path, "train.steps=3", "checkpoint.every=1", "checkpoint.best=held_out_loss")
    for evaluation in (("train.eval_every=0",), ("train.eval_every=2",), ("train.eval_batches=0",)):
        with pytest.raises(UserError, match=r"some have none; set train\.eval_every=1 and train\.eval_batches above 0"):
            main([*arguments, *evaluation])
    evaluated = [*arguments, "train.eval_every=1", "train.eval_batches=1", "optimizer.learning_rate=1"]
    assert main([*evaluated, "checkpoint.keep=1"]) == 0
    records = [record for record in read_metrics(folder_of(evaluated)) if "held_out_loss" in record]
    best = min(records, key=lambda record: record["held_out_loss"])
    assert steps_kept(folder_of(evaluated)) == {best["step"], 3}
    found = Checkpoints(folder_of(evaluated) / "checkpoints").read_record(best["step"])["metrics"]
    assert found["held_out_loss"] == best["held_out_loss"]


@pytest.mark.parametrize("victim", ["manifest.json", "record.json", "state"])
def test_a_run_falls_back_when_asked_and_goes_on_as_it_did(copied, capfd, caplog, victim):
    before = what_was_learnt(folder_of(copied))
    newest = next((folder_of(copied) / "checkpoints").glob("step_00000004-*"))
    file = newest / victim
    if file.is_dir():
        file = max(file.rglob("d/*"), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(UserError, match="The checkpoint of step 4 cannot be used.*The checkpoint of step 2"):
        main([*copied, "train.steps=6"])
    assert what_was_learnt(folder_of(copied)) == before
    assert main([*copied, "checkpoint.fall_back=true"]) == 0
    assert "Resuming from step 2." in capfd.readouterr().out
    assert "falling back to the checkpoint of step 2, which is whole" in caplog.text
    assert what_was_learnt(folder_of(copied)) == before  # steps 3 and 4 once more, the same numbers
    assert steps_kept(folder_of(copied)) == {2, 4}
    assert main([*copied, "train.steps=5"]) == 0  # the damaged one is in nobody's way any more


def test_a_new_run_begins_with_the_weights_of_another(trained, tmp_path):
    source = folder_of(trained)
    older = next((source / "checkpoints").glob("step_00000002-*"))
    for given, step in ((source, 4), (older, 2)):
        arguments = [*trained, f"run.dir={tmp_path}", f"run.name=from_{step}", f"train.init_from={given}"]
        with Trainer(config_io.load(None, arguments)) as trainer:
            assert trainer.resumed_from is None and trainer.step_number == 0
            assert f"Weights of step {step} of {source}; the optimizer" in "\n".join(trainer.describe())
            portable = trainer.program.portable(trainer.state)
            jax.tree.map(np.testing.assert_array_equal, portable.master, SavedModel(source, step).params())
            assert not any(np.any(x) for x in jax.tree.leaves(portable.first_moment))
            trainer.step()
            trainer.save(wait=True)
    with Trainer(config_io.load(None, [*arguments, "train.init_from=null"])) as trainer:  # it has its own now
        assert trainer.resumed_from == 1


@pytest.mark.parametrize(
    ("given", "overrides", "says"),
    [
        ("{run}", ("model.moe.hidden=16",), "those of another model (model.moe.hidden: 32 -> 16)"),
        ("{run}/checkpoints/step_00000009-0009", (), "no checkpoint of step 9"),
        ("{run}/nowhere", (), "is no run folder"),
    ],
)
def test_weights_that_do_not_fit_are_refused_and_nothing_is_written(trained, tmp_path, given, overrides, says):
    given = given.format(run=folder_of(trained))
    arguments = [*trained, *overrides, f"run.dir={tmp_path}", "run.name=new", f"train.init_from={given}"]
    with pytest.raises(UserError) as refusal:
        main(arguments)
    assert says in str(refusal.value)
    assert not list((tmp_path / "new").glob("*.*"))
