"""Bad input is one sentence that names what is wrong and the way out, exit code 2, no traceback, and nothing lost."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moejax import config_io
from moejax.checkpoint.manager import Checkpoints
from moejax.errors import UserError
from moejax.mesh import make_mesh, parse_mesh
from moejax.trainer import Trainer
from tests.runs import ROOT, finish, main, run_arguments, start, write_text

SHORT = ("train.steps=4", "checkpoint.every=2", "train.eval_batches=0", "data.validation_fraction=0")


def refusal(arguments: list[str]) -> str:
    with pytest.raises(UserError) as error:
        main(arguments)
    sentence = str(error.value)
    assert "\n" not in sentence and sentence.endswith((".", "?"))
    return sentence


def answer(process: subprocess.Popen[str]) -> str:
    """What a process that had to refuse says: one line, exit code 2."""
    output = process.communicate(timeout=240)[0]
    assert process.returncode == 2, output
    assert "Traceback" not in output and output.count("error:") == 1, output
    return next(line for line in output.splitlines() if line.startswith("error:"))


# --- through the command, in a process of its own ------------------------------------------------------------------


def test_an_unknown_key_is_one_line_on_stderr_and_exit_code_2(tmp_path):
    arguments = [sys.executable, "-m", "moejax.train", "model.moe.n_experts=4", f"run.dir={tmp_path}"]
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        done.stderr
        == "error: There is no configuration field model.moe.n_experts; did you mean model.moe.num_experts?\n"
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.timeout(900)
def test_a_full_disk_leaves_the_previous_checkpoint_and_the_run_goes_on_once_there_is_room(tmp_path):
    arguments, folder = run_arguments(tmp_path, *SHORT), tmp_path / "runs" / "small"
    finish(start([*arguments, "train.steps=2"]))
    before = _contents(folder / "checkpoints")
    assert before
    # a limit on the size of files stands in for the disk: metrics and log still fit, arrays do not
    command = [sys.executable, "-c", _WITH_LITTLE_ROOM, *arguments]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert "The checkpoint of step 4 could not be saved" in (sentence := answer(process))
    assert "the one of step 2 is untouched" in sentence
    assert _contents(folder / "checkpoints") == before
    finish(start(arguments))
    assert Checkpoints(folder / "checkpoints").steps() == [2, 4]


_WITH_LITTLE_ROOM = """
import resource, sys
from moejax import cli, train
resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))
cli.run(train.main, sys.argv[1:])
"""


def _contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# --- the rest in this process: it is the same sentence -------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "says"),
    [
        (["--mesh", "ep=3"], "ep=3 does not divide model.moe.num_experts=8; near it these fit: "),
        (["--mesh", "pp=4"], "pp=4 is more stages than model.n_layers=2; near it these fit: "),
        (["--mesh", "dp=1000"], "dp*ep=1000 does not divide the 16 sequences of a microbatch"),
        (["--mesh", "dp=2,tp=2"], "has an axis 'tp'; the axes are dp, ep and pp."),
        (["--mesh", "ep=2", "parallel.experts.transport=local"], "transport=local needs ep=1"),
        (["--speed", "9"], "Unrecognized arguments: --speed 9; --help lists what there is."),
        (["--config", "configs/absent.yaml"], "There is no configuration file configs/absent.yaml; there are: "),
        (["train.steps=many"], "train.steps=many must be a whole number."),
        (["steps=3"], "There is no configuration field steps; did you mean train.steps?"),
        (["model.vocab_size=200"], "model.vocab_size=200 is smaller than the 257 tokens of data.tokenizer=bytes; "),
        (["data.paths=nowhere"], "nowhere does not exist: check data.paths"),
        (["data.tokenizer=nowhere.json"], "nowhere.json"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_what_cannot_be_is_refused_before_anything_is_written(tmp_path, override, says):
    write_text(tmp_path)
    assert says in refusal([*run_arguments(tmp_path), *override])
    assert not (tmp_path / "runs").exists()


def test_the_meshes_offered_fit(tmp_path):
    arguments = run_arguments(tmp_path)
    sentence = refusal([*arguments, "--mesh", "dp=3,ep=4"])
    offered = sentence.rpartition("these fit: ")[2].rstrip(".").split(" or ")
    assert len(offered) == 3
    for mesh in offered:
        Trainer(config_io.load(None, [*arguments, f"parallel.mesh='{mesh}'"]), folder=None).close()


class _Gpu:
    platform = "gpu"


def test_too_few_gpus_are_counted():
    with pytest.raises(UserError) as error:
        make_mesh(parse_mesh("dp=2,ep=8"), [_Gpu()] * 8)  # type: ignore[list-item]
    assert "The mesh dp=2,ep=8,pp=1 needs 16 devices and there are 8 (GPU)" in str(error.value)
    assert "ask for a smaller mesh" in str(error.value)


@pytest.mark.parametrize("text", ["", "too short"])
def test_an_empty_corpus_is_named(tmp_path, text):
    arguments = run_arguments(tmp_path)
    for path in (tmp_path / "text").iterdir():
        path.write_text("")
    next((tmp_path / "text").iterdir()).write_text(text)
    sentence = refusal(arguments)
    assert ("the corpus is too short" if text else "the corpus is empty") in sentence
    assert not (tmp_path / "runs").exists()


def test_a_token_id_beyond_the_vocabulary_is_named_with_its_place(tmp_path):
    ids = np.arange(1000, dtype=np.uint16) % 256
    ids[777] = 300
    np.save(tmp_path / "ids.npy", ids)
    sentence = refusal([*run_arguments(tmp_path), f"data.paths={tmp_path / 'ids.npy'}"])
    assert f"token id 300 at position 777 of {tmp_path / 'ids.npy'}" in sentence and "vocabulary of 288" in sentence


@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_offered(tmp_path, damage):
    arguments, folder = run_arguments(tmp_path, *SHORT), tmp_path / "runs" / "small"
    assert main(arguments) == 0
    newest = next((folder / "checkpoints").glob("step_00000004-*"))
    victim = max(newest.rglob("d/*"), key=lambda path: path.stat().st_size)
    whole = victim.read_bytes()
    victim.write_bytes(whole[:-1]) if damage == "cut" else victim.unlink()
    before = _contents(folder)
    sentence = refusal([*arguments, "train.steps=6"])
    assert "The checkpoint of step 4 cannot be used" in sentence and victim.name in sentence
    assert f"The checkpoint of step 2, saved before it, is whole: to go on from there, move {newest} away." in sentence
    assert _contents(folder) == before
    newest.rename(tmp_path / "aside")  # the way out that was offered
    assert main([*arguments, "train.steps=6"]) == 0


def _as_somebody_else(action: Callable[[], Any]) -> Any:
    """Runs as a user to whom permissions apply, as they do not to root."""
    if os.geteuid() != 0:
        return action()
    os.seteuid(65534)
    try:
        return action()
    finally:
        os.seteuid(0)


@pytest.fixture
def open_to_all(tmp_path: Path) -> Path:
    """tmp_path, and all that leads there and can be ours, passable to any user."""
    for path in (tmp_path, *tmp_path.parents[:3]):
        if path != Path("/tmp") and path.owner() == tmp_path.owner() and path != Path("/"):
            path.chmod(path.stat().st_mode | 0o755)
    return tmp_path


def test_a_read_only_run_folder_is_named(open_to_all):
    arguments = run_arguments(open_to_all, *SHORT)
    Trainer(config_io.load(None, arguments), folder=None).close()  # the text is in the cache
    runs = open_to_all / "runs"
    runs.mkdir(mode=0o555)
    sentence = _as_somebody_else(lambda: refusal(arguments))
    assert f"{runs / 'small'} cannot be written (permission denied); make it writable or choose another" in sentence
    assert "run.dir=FOLDER" in sentence
    assert not list(runs.iterdir())


def test_a_cache_folder_that_cannot_be_written_is_named(open_to_all):
    arguments = run_arguments(open_to_all, *SHORT)
    (open_to_all / "cache").mkdir(mode=0o555)
    sentence = _as_somebody_else(lambda: refusal(arguments))
    assert f"cannot write the token cache {open_to_all / 'cache'} (Permission denied)" in sentence
    assert "data.cache_dir=FOLDER" in sentence
    assert not (open_to_all / "runs").exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_disk_that_fills_up_with_metrics_is_named(tmp_path):
    arguments, folder = run_arguments(tmp_path, *SHORT), tmp_path / "runs" / "small"
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").symlink_to("/dev/full")
    sentence = refusal(arguments)
    assert f"No room is left on the disk that holds {folder / 'metrics.jsonl'}; free some" in sentence


@pytest.mark.parametrize("content", ["", "model: [", "3"])
def test_a_spoilt_record_of_the_settings_is_named(tmp_path, content):
    arguments, folder = run_arguments(tmp_path, *SHORT, "train.steps=2"), tmp_path / "runs" / "small"
    assert main(arguments) == 0
    (folder / "config.yaml").write_text(content)
    assert f"{folder / 'config.yaml'}, the settings this run was started with, cannot be read" in refusal(arguments)


def test_other_text_is_refused_on_resume(tmp_path):
    arguments = run_arguments(tmp_path, *SHORT, "train.steps=2")
    assert main(arguments) == 0
    assert "does not fit the data of this run: seed (was 0, is 1)" in refusal([*arguments, "data.seed=1"])
