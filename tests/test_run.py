"""The run: killed, interrupted or changed, it goes on as if nothing had happened, or says why not.

one run undisturbed --its metrics.jsonl--> every other run of the same command must have written the same, bit for bit
"""

import json
import os
import random
import signal
import socket
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from moejax import config_io
from moejax.errors import UserError
from moejax.observe.jsonl import FILE_NAME, read_metrics
from moejax.run_folder import RunFolder
from moejax.trainer import Trainer
from tests.runs import ROOT, finish, main, run_arguments, start, steps_written, wait_until, what_was_learnt

STEPS = 100
LONG = (
    *(f"train.steps={STEPS}", "checkpoint.every=3", "train.eval_every=40", "train.eval_batches=2"),
    *("optimizer.schedule.kind=wsd", "optimizer.schedule.warmup_steps=10"),
)
SHORT = ("train.steps=4", "checkpoint.every=2", "train.eval_batches=1")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    folder = tmp_path_factory.mktemp("undisturbed")
    process = start(run_arguments(folder, *LONG))
    output = finish(process)
    assert process.returncode == 0, output
    assert f"Step {STEPS} is saved in {folder}/runs/small; the run is finished." in output
    return what_was_learnt(folder / "runs" / "small")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The arguments of a short run that has been run to its end."""
    arguments = run_arguments(tmp_path_factory.mktemp("finished"), *SHORT)
    assert main(arguments) == 0
    return arguments


@pytest.mark.timeout(900)
def test_killed_at_random_moments_a_run_writes_what_an_undisturbed_one_writes(tmp_path, undisturbed):
    folder, rng = tmp_path / "runs" / "small", random.Random(1)
    saves = folder / "checkpoints"

    def saving() -> bool:
        return any(saves.glob("*.saving"))

    # at a step and a moment within it, twice; in the midst of a save, once early and once late in it
    at_step = [rng.randrange(5, 30), rng.randrange(45, 60)]
    moments = [
        lambda: steps_written(folder) >= at_step[0],
        saving,
        lambda: steps_written(folder) >= at_step[1],
        lambda: any(path.is_dir() for path in saves.glob("*.saving/state/*")),
    ]
    killed = 0
    for moment in moments:
        process = start(run_arguments(tmp_path, *LONG))
        began = steps_written(folder)
        if wait_until(process, lambda began=began, moment=moment: steps_written(folder) != began and moment()):
            try:
                process.wait(rng.random() * 0.02)
            except subprocess.TimeoutExpired:
                process.kill()
                killed += 1
        finish(process)
    assert killed >= 3
    process = start(run_arguments(tmp_path, *LONG))
    output = finish(process)
    assert process.returncode == 0, output
    assert "Resuming from step " in output
    assert what_was_learnt(folder) == undisturbed


@pytest.mark.timeout(900)
def test_ctrl_c_and_sigterm_save_and_leave_and_the_run_goes_on(tmp_path, undisturbed):
    folder = tmp_path / "runs" / "small"
    # no checkpoint but those of the interruptions; it may change from start to start
    arguments = [*run_arguments(tmp_path, *LONG), "checkpoint.every=0"]
    reached = 0
    for number, name in ((signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTERM")):
        process = start(arguments)
        assert wait_until(process, lambda at=reached + 5: steps_written(folder) >= at)
        process.send_signal(number)
        output = finish(process)
        assert process.returncode == 128 + number, output
        assert f"{name}: the step under way is finished, then saved; a second one leaves at once." in output
        assert "Traceback" not in output
        assert f"Resuming from step {reached}." in output or not reached
        steps = [record["step"] for record in read_metrics(folder)]
        reached = steps[-1]
        assert f"Step {reached} is saved in {folder}; the same command goes on from there." in output
    process = start(arguments)
    output = finish(process)
    assert process.returncode == 0, output
    assert f"Resuming from step {reached}." in output
    assert what_was_learnt(folder) == undisturbed


INTERRUPTED = """
import os, signal, time
from moejax.signals import Interruption
heard = []
before = signal.getsignal(signal.SIGINT)  # ignored, where the tests were started in the background
with Interruption(heard.append, lambda number: print("leaving", number, heard)) as interruption:
    os.kill(os.getpid(), signal.{first})
    while not (interruption.signal and heard):
        time.sleep(0.001)
    assert interruption.signal == signal.{first} == heard[0]
    {then}
print("after", signal.getsignal(signal.SIGINT) is before, signal.set_wakeup_fd(-1))
"""


@pytest.mark.parametrize("first", ["SIGINT", "SIGTERM"])
def test_the_first_signal_is_a_request_and_the_second_ends_the_process(first):
    # sleep is taken up again after a signal: the main thread is away, as in a long compilation
    twice = "os.kill(os.getpid(), signal.SIGINT); time.sleep(100)"
    for then, code, says in (("pass", 0, "after True -1"), (twice, 130, "leaving 2")):
        program = INTERRUPTED.format(first=first, then=then)
        done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
        assert done.returncode == code, done.stderr
        assert done.stdout.strip().startswith(says)


@pytest.mark.timeout(900)
def test_two_processes_train_as_one_and_leave_together(tmp_path, undisturbed):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]

    without_evaluation = run_arguments(tmp_path, *LONG, "train.eval_batches=0")

    def start_both() -> list[subprocess.Popen[str]]:
        place = {"MOEJAX_COORDINATOR": f"localhost:{port}", "MOEJAX_PROCESSES": "2"}
        arguments = [*without_evaluation, "--mesh", "dp=2"]
        return [start(arguments, MOEJAX_PROCESS=str(index), **place) for index in range(2)]

    folder = tmp_path / "runs" / "small"
    first, second = start_both()
    assert wait_until(first, lambda: steps_written(folder) >= 4)
    second.send_signal(signal.SIGTERM)  # one of them is told
    outputs = [finish(first), finish(second)]
    assert [first.returncode, second.returncode] == [128 + signal.SIGTERM] * 2, outputs
    there = read_metrics(folder)
    assert 4 <= len(there) < STEPS
    assert "2 simulated CPU devices in 2 processes, mesh dp=2,ep=1,pp=1" in outputs[0]
    assert f"Step {there[-1]['step']} is saved" in outputs[0]
    assert "loss" not in outputs[1]  # the second one is silent
    # what two wrote, one takes up
    process = start(without_evaluation)
    output = finish(process)
    assert process.returncode == 0, output
    assert f"Resuming from step {there[-1]['step']}." in output
    undisturbed = [record for record in undisturbed if "loss" in record]
    for ours, theirs in zip(read_metrics(folder)[: len(there) + 3], undisturbed, strict=False):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert ours["expert_counts"] == theirs["expert_counts"]


def test_metrics_begin_with_the_loss_and_the_files_are_there(finished):
    folder = Path(config_io.load(None, finished).run.dir) / "small"
    lines = [json.loads(line) for line in (folder / FILE_NAME).read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 4]
    assert list(lines[0])[:2] == ["step", "loss"]
    assert all(type(count) is int for layer in lines[0]["expert_counts"] for count in layer)
    assert list(lines[-1]) == ["step", "held_out_loss"]
    assert {path.name for path in folder.iterdir()} == {"checkpoints", "config.yaml", FILE_NAME, "lock", "log.txt"}
    assert config_io.load(folder / "config.yaml") == config_io.load(None, finished)


def test_a_finished_run_says_so_and_writes_nothing(finished, capsys):
    folder = Path(config_io.load(None, finished).run.dir) / "small"
    before = (folder / FILE_NAME).read_bytes()
    assert main(finished) == 0
    assert "The run has reached step 4 already; give train.steps=N with a larger N to go on." in capsys.readouterr().out
    assert (folder / FILE_NAME).read_bytes() == before


def test_changed_settings_are_said_and_another_model_is_refused_by_its_fields(finished, capsys):
    folder = Path(config_io.load(None, finished).run.dir) / "small"
    before = (folder / "config.yaml").read_bytes()
    with pytest.raises(UserError) as refusal:
        main([*finished, "model.moe.hidden=16", "model.tie_embeddings=true", "optimizer.clip=2"])
    assert "model.tie_embeddings: false -> true; model.moe.hidden: 32 -> 16" in str(refusal.value)
    assert "run.name=NAME" in str(refusal.value) and "optimizer" not in str(refusal.value)
    assert (folder / "config.yaml").read_bytes() == before
    # what is no matter of the weights, the mesh included, may change
    assert main([*finished, "--mesh", "ep=2", "train.steps=5", "model.z_loss=0.001"]) == 0
    output = capsys.readouterr().out
    assert "Settings changed since this run was last started: model.z_loss: 0.0001 -> 0.001; " in output
    assert "parallel.mesh: dp=1 -> ep=2; train.steps: 4 -> 5." in output
    assert "Resuming from step 4." in output and "step 5/5" in output


def test_another_model_may_take_a_folder_without_weights(tmp_path):
    arguments = run_arguments(tmp_path, *SHORT)
    with Trainer(config_io.load(None, arguments)):
        pass
    with Trainer(config_io.load(None, [*arguments, "model.moe.hidden=16"])) as trainer:
        assert trainer.changed == []


def test_a_second_run_in_one_folder_is_refused(tmp_path):
    arguments = run_arguments(tmp_path, *SHORT)
    with Trainer(config_io.load(None, arguments)) as first:
        with pytest.raises(UserError, match="Another process is training in .*/runs/small; .*run.name=NAME"):
            main(arguments)
        first.step()
    RunFolder(first.config).close()  # left by the first, and not held by the refused second


@pytest.mark.parametrize("steps_done", [0, 2])
def test_a_loss_that_is_no_number_stops_the_run_and_saves_nothing_of_it(tmp_path, steps_done):
    arguments = run_arguments(tmp_path, *SHORT, "optimizer.clip=0")
    if steps_done:
        assert main([*arguments, f"train.steps={steps_done}"]) == 0
    with pytest.raises(UserError, match="Step .* has loss .*nan.* lower optimizer.learning_rate"):
        main([*arguments, "optimizer.learning_rate=1e30", "train.steps=9"])
    config = config_io.load(None, arguments)
    with Trainer(config) as trainer:
        assert trainer.step_number in range(steps_done, steps_done + 3)
        assert all(map(_finite, jax.tree.leaves(trainer.state.master)))


def _finite(x: jax.Array) -> bool:
    return bool(jax.numpy.isfinite(x).all())


def test_the_steps_asked_for_are_profiled(tmp_path):
    arguments = run_arguments(tmp_path, *SHORT, "train.profile=1,3")
    assert main(arguments) == 0
    assert list((tmp_path / "runs" / "small" / "profile").rglob("*.xplane.pb"))


def test_without_a_folder_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = run_arguments(tmp_path, *SHORT)
    trainer = Trainer(config_io.load(None, arguments), folder=None)
    before = sorted(os.listdir(tmp_path))
    losses = [trainer.step()["loss"] for _ in range(2)]
    trainer.save(wait=True)
    trainer.close()
    assert losses[1] < losses[0]
    assert sorted(os.listdir(tmp_path)) == before == ["cache", "text"]
