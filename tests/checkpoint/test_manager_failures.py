"""Damage is named and walked around; a refused write is one sentence and costs no older checkpoint."""

import errno
import logging
import os
import random
import resource
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from moejax.checkpoint import arrays, manifest
from moejax.checkpoint.manager import Checkpoints
from moejax.errors import UserError
from tests.checkpoint.states import (
    MESHES,
    assert_same,
    names,
    restored_value,
    small,
    state_on,
    target_on,
    values,
)

# --- damage --------------------------------------------------------------------------------------------------------


def truncate(path: Path, rng: random.Random) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: rng.randrange(len(content))])


def flip(path: Path, rng: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def delete(path: Path, rng: random.Random) -> None:
    path.unlink()


def lengthen(path: Path, rng: random.Random) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


@pytest.mark.parametrize("damage", [truncate, flip, delete, lengthen])
def test_every_damaged_file_is_named_and_the_previous_checkpoint_is_taken_when_asked(tmp_path, caplog, damage):
    origin = Checkpoints(tmp_path / "origin")
    origin.save(50, state_on(MESHES["2x4"], 50), {"is": 50})
    origin.save(100, state_on(MESHES["2x4"], 100), {"is": 100}, wait=True)
    target, rng = target_on(MESHES["1"]), random.Random(1)
    files = manifest.file_names(origin.directory / "step_00000100-0002")
    assert {"manifest.json", "record.json"} < set(files) and len(files) > 6
    for number, file in enumerate(files):
        folder = shutil.copytree(origin.directory, tmp_path / f"{number}")
        damage(folder / "step_00000100-0002" / file, rng)
        checkpoints = Checkpoints(folder)
        with pytest.raises(UserError) as raised:
            checkpoints.restore(target)
        sentence = str(raised.value)
        assert f"in {folder}/step_00000100-0002 {file} is " in sentence
        assert sentence.startswith("The checkpoint of step 100 cannot be used")
        assert "The checkpoint of step 50, saved before it, is whole" in sentence
        caplog.clear()
        state, record = checkpoints.restore(target, fall_back=True)
        assert record == {"is": 50} and int(state.step) == 50
        assert [r.levelname for r in caplog.records] == ["WARNING"]
        assert f"{file} is " in caplog.text and "falling back to the checkpoint of step 50" in caplog.text
        assert checkpoints.steps() == [50] and checkpoints.latest() == 50
    assert_same(state, values(50))
    assert_same(origin.restore(target)[0], values(100))  # the undamaged one still is


def test_moving_the_damaged_folder_away_is_the_way_out(tmp_path):
    checkpoints = Checkpoints(tmp_path / "run")
    for step in (1, 2):
        checkpoints.save(step, small(step), {}, wait=True)
    delete(tmp_path / "run/step_00000002-0002/record.json", random.Random())
    with pytest.raises(UserError, match="move .*step_00000002-0002 away") as raised:
        restored_value(checkpoints)
    folder = str(raised.value).split("move ")[1].split(" away")[0]
    shutil.move(folder, tmp_path)
    assert restored_value(checkpoints) == 1


def test_damaged_checkpoints_do_not_count_among_those_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save(1, small(1), {}, wait=True)
    shutil.copytree(tmp_path / "step_00000001-0001", tmp_path / "step_00000002-0002")  # says it is of step 1
    assert restored_value(checkpoints, fall_back=True) == 1
    checkpoints.save(3, small(3), {}, wait=True)
    assert checkpoints.steps() == [1, 3] and restored_value(checkpoints, step=1) == 1
    checkpoints.save(4, small(4), {}, wait=True)
    assert names(tmp_path) == ["step_00000003-0003", "step_00000004-0004"]  # and it went when it was old
    checkpoints.save(2, small(20), {}, wait=True)  # its step is free again
    assert restored_value(checkpoints, step=2) == 20


def test_fall_back_goes_as_far_back_as_it_must_and_no_further_than_there_is(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=4)
    for step in (1, 2, 3):
        checkpoints.save(step, small(step), {}, wait=True)
    for number in (3, 2):
        (tmp_path / f"step_0000000{number}-000{number}/manifest.json").write_text("{}")
    with pytest.raises(UserError, match="The checkpoint of step 1, saved before it, is whole"):
        restored_value(checkpoints)
    assert restored_value(Checkpoints(tmp_path), fall_back=True) == 1
    (tmp_path / "step_00000001-0001/manifest.json").unlink()
    with pytest.raises(UserError, match="of step 3 cannot be used.* none of those before it is whole"):
        restored_value(Checkpoints(tmp_path), fall_back=True)
    with pytest.raises(UserError, match="of step 1 cannot be used.* there is none before it"):
        restored_value(Checkpoints(tmp_path), step=1, fall_back=True)
    with pytest.raises(UserError, match=r"manifest\.json is not as it was written\.$"):
        checkpoints.read_record(3)
    with pytest.raises(UserError, match=r"manifest\.json is missing\.$"):
        checkpoints.read_manifest(1)


# --- what the file system refuses ----------------------------------------------------------------------------------


def test_absent_checkpoints_are_told(tmp_path):
    absent = Checkpoints(tmp_path / "absent")
    assert absent.latest() is None and absent.steps() == []
    with pytest.raises(UserError, match="There is no checkpoint in .*absent; train first"):
        restored_value(absent)
    assert not (tmp_path / "absent").exists()  # asking makes nothing
    absent.save(3, small(3), {}, wait=True)
    with pytest.raises(UserError, match="no checkpoint of step 4 in .*, only of steps 3"):
        restored_value(absent, step=4)
    with pytest.raises(UserError, match="checkpoint.keep=0 must be at least 1"):
        Checkpoints(tmp_path, keep=0)


def test_a_file_in_place_of_the_folder_is_told(tmp_path):
    (tmp_path / "checkpoints").write_text("")
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    with pytest.raises(UserError, match="checkpoints cannot be read .not a directory.*"):
        checkpoints.latest()
    with pytest.raises(UserError, match="step 1 could not be saved: .*checkpoints cannot be written .file exists.*"):
        checkpoints.save(1, small(1), {})


@pytest.mark.parametrize("code, words", [(errno.EROFS, "read-only file system"), (errno.EACCES, "permission denied")])
def test_a_read_only_folder_is_told_at_once_and_the_old_checkpoint_stays(tmp_path, monkeypatch, code, words):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, small(1), {}, wait=True)

    def mkdir(path: Any, *_: Any, **__: Any) -> None:
        raise OSError(code, os.strerror(code), str(path))

    # root writes where others may not: refuse in its name
    monkeypatch.setattr(os, "mkdir", mkdir)
    with pytest.raises(UserError) as raised:
        checkpoints.save(2, small(2), {})
    assert str(raised.value) == (
        f"The checkpoint of step 2 could not be saved: {tmp_path} cannot be written ({words}); "
        "the one of step 1 is untouched. Make it writable and give the same command again."
    )
    assert restored_value(checkpoints) == 1


def full_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    """What TensorStore says on a full disk (seen on a tmpfs), after half of the work."""
    start_saving = arrays.start_saving

    def fail(folder: Path, *arguments: Any) -> Callable[[], None]:
        finish = start_saving(folder, *arguments)

        def finish_and_fail() -> None:
            finish()
            raise ValueError("RESOURCE_EXHAUSTED: Failed to write: No space left on device [os_error_code='28']")

        return finish_and_fail

    monkeypatch.setattr(arrays, "start_saving", fail)


def full_at(function: str) -> Callable[[pytest.MonkeyPatch], None]:
    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(manifest, function, fail)

    return patch


@pytest.mark.parametrize(
    "make_full", [full_arrays, full_at("write_flushed"), full_at("seal"), full_at("write")], ids=["1", "2", "3", "4"]
)
def test_a_full_disk_is_told_and_leaves_the_old_checkpoint_and_no_debris(tmp_path, monkeypatch, make_full):
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, small(1), {}, wait=True)
    with monkeypatch.context() as patched:
        make_full(patched)
        with pytest.raises(UserError) as raised:
            checkpoints.save(2, small(2), {})
            checkpoints.save(3, small(3), {})  # here, at the latest, what went wrong with step 2 comes out
    assert str(raised.value) == (
        f"The checkpoint of step 2 could not be saved: no room is left on the disk that holds {tmp_path}; "
        "the one of step 1 is untouched. Free some and give the same command again."
    )
    assert names(tmp_path) == ["step_00000001-0001"] and restored_value(checkpoints) == 1
    checkpoints.save(3, small(3), {}, wait=True)
    assert restored_value(checkpoints) == 3


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_a_write_that_the_system_refuses_halfway_is_told_in_one_sentence_only(tmp_path, capfd):
    """The real way through TensorStore: no file may grow beyond 64 KiB while the second checkpoint is written."""
    logging.getLogger("absl").addHandler(shown := logging.StreamHandler(sys.stderr))
    sharding = NamedSharding(MESHES["8"], PartitionSpec("b"))
    big = {f"w{i}": jax.device_put(np.arange(2**17, dtype=np.float32) + i, sharding) for i in range(4)}
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, big, {}, wait=True)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, limits[1]))
    try:
        checkpoints.save(2, big, {})
        with pytest.raises(
            UserError, match=r"could not be saved: .* cannot be written .file too large.*; the one of step 1"
        ):
            checkpoints.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        logging.getLogger("absl").removeHandler(shown)
    assert names(tmp_path) == ["step_00000001-0001"]
    assert_same(checkpoints.restore(big)[0], big)
    assert capfd.readouterr().err == ""


def test_an_old_checkpoint_that_cannot_be_removed_does_not_fail_the_new_one(tmp_path, monkeypatch, caplog):
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, small(1), {}, wait=True)

    def rmtree(path: Any, *_: Any, **__: Any) -> None:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(path))

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", rmtree)
        checkpoints.save(2, small(2), {}, wait=True)
    assert "could not be removed (device or resource busy)" in caplog.text
    assert checkpoints.steps() == [2]
    checkpoints.save(3, small(3), {}, wait=True)
    assert names(tmp_path) == ["step_00000003-0003"]
