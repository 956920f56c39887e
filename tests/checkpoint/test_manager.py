"""Checkpoints: bit for bit onto any mesh, whole or not at all, damage named, nothing lost by a failure or a kill."""

import errno
import logging
import os
import random
import resource
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from moejax.checkpoint import arrays, manifest
from moejax.checkpoint.manager import Checkpoints
from moejax.errors import UserError

ROOT = Path(__file__).resolve().parents[2]


class State(NamedTuple):
    step: Any
    master: Any
    moments: Any


MESHES = {
    "8": Mesh(np.array(jax.devices()[:8]).reshape(1, 8), ("a", "b")),
    "2x4": Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("a", "b")),
    "4x2 reversed": Mesh(np.array(jax.devices()[7::-1]).reshape(4, 2), ("a", "b")),
    "1": Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("a", "b")),
}
SPECS = State(
    step=PartitionSpec(),
    master={
        "blocks": {"w": PartitionSpec(None, "b", "a"), "scale": PartitionSpec()},
        "half": PartitionSpec("b"),
        "none": PartitionSpec("a"),
    },
    moments=[PartitionSpec(("a", "b"))],
)


def values(step: int) -> State:
    """A state made from its step: every dtype and corner that a run has, floats from all bit patterns but NaNs."""
    rng = np.random.default_rng(step)

    def floats(*shape: int) -> np.ndarray:
        x = rng.integers(0, 2**32, shape, np.uint32).view(np.float32)
        return np.where(np.isnan(x), np.float32(-0.0), x)

    return State(
        step=np.int32(step),
        master={
            "blocks": {"w": floats(3, 16, 8), "scale": floats(5)},
            "half": floats(8, 3).astype(jnp.bfloat16),
            "none": np.zeros((0, 4), np.float32),
        },
        moments=[rng.integers(-(2**31), 2**31, (16,), np.int32)],
    )


def shardings(mesh: Mesh, specs: Any = SPECS) -> Any:
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda x: isinstance(x, PartitionSpec))


def state_on(mesh: Mesh, step: int) -> State:
    return jax.device_put(values(step), shardings(mesh))


def target_on(mesh: Mesh, specs: Any = SPECS) -> State:
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), values(0), shardings(mesh, specs)
    )


def assert_same(found: Any, expected: Any) -> None:
    def same(x: Any, y: np.ndarray) -> None:
        assert x.dtype == y.dtype and x.shape == y.shape
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()

    jax.tree.map(same, found, expected)


@pytest.fixture
def small():
    """A state of one tensor, for tests of what happens around the arrays."""
    return lambda step: {"w": jnp.full((4,), step, jnp.float32)}


SMALL_TARGET = {"w": jax.ShapeDtypeStruct((4,), jnp.float32)}


def restored_value(checkpoints: Checkpoints, **how: Any) -> float:
    return float(checkpoints.restore(SMALL_TARGET, **how)[0]["w"][0])


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


# --- there and back ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("there", MESHES)
@pytest.mark.parametrize("here", MESHES)
def test_a_state_comes_back_bit_for_bit_on_another_mesh(tmp_path, there, here):
    Checkpoints(tmp_path).save(7, state_on(MESHES[there], 7), {"mesh": there}, wait=True)
    target = target_on(MESHES[here])
    state, record = Checkpoints(tmp_path).restore(target)
    assert isinstance(state, State) and record == {"mesh": there}
    assert_same(state, values(7))
    jax.tree.map(lambda x, t: x.sharding == t.sharding or pytest.fail(str(x.sharding)), state, target)


AXES = [None, "a", "b", ("a", "b")]


@given(specs=st.tuples(*[st.sampled_from(AXES)] * 6))
def test_any_sharding_can_be_read_from_any_other(tmp_path_factory, specs):
    def spec(axes: tuple) -> PartitionSpec:
        used: set[str] = set()
        kept = []
        for axis in axes:
            parts = {axis} if isinstance(axis, str) else set(axis or ())
            kept.append(None if parts & used else axis)
            used |= parts
        return PartitionSpec(*kept)

    folder = tmp_path_factory.mktemp("any")
    value = np.arange(8 * 16 * 24, dtype=np.float32).reshape(8, 16, 24)
    there, here = NamedSharding(MESHES["2x4"], spec(specs[:3])), NamedSharding(MESHES["4x2 reversed"], spec(specs[3:]))
    checkpoints = Checkpoints(folder)
    checkpoints.save(1, {"w": jax.device_put(value, there)}, {}, wait=True)
    state, _ = checkpoints.restore({"w": jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=here)})
    assert_same(state, {"w": value})
    assert state["w"].sharding == here


def test_little_memory_is_enough(tmp_path):
    checkpoints = Checkpoints(tmp_path, memory_gb=1e-6)
    checkpoints.save(1, state_on(MESHES["2x4"], 1), {}, wait=True)
    assert_same(checkpoints.restore(target_on(MESHES["8"]))[0], values(1))


def test_a_part_is_restored_only_when_asked_for(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, state_on(MESHES["2x4"], 1), {}, wait=True)
    part = {"master": target_on(MESHES["8"]).master}
    assert_same(checkpoints.restore(part, subset=True)[0], {"master": values(1).master})
    with pytest.raises(UserError, match=r"does not fit the model here: only there: step, moments/0\."):
        checkpoints.restore(part)


def test_orbax_alone_can_read_it(tmp_path):
    Checkpoints(tmp_path).save(3, state_on(MESHES["2x4"], 3), {}, wait=True)
    arguments = {"step": ocp.ArrayRestoreArgs(sharding=NamedSharding(MESHES["8"], PartitionSpec()))}
    with ocp.PyTreeCheckpointer() as checkpointer:
        (folder,) = tmp_path.glob("step_*/state")
        tree = checkpointer.restore(
            folder, args=ocp.args.PyTreeRestore({"step": 0}, restore_args=arguments, partial_restore=True)
        )
    assert int(tree["step"]) == 3


def test_the_record_and_the_manifest_can_be_read_without_the_arrays(tmp_path, small):
    checkpoints, record = Checkpoints(tmp_path), {"data": {"epoch": 1, "position": [2, 3]}, "loss": 0.1}
    checkpoints.save(5, state_on(MESHES["2x4"], 5), record)
    record["data"]["epoch"] = 99  # the record is the one of the moment of saving
    checkpoints.save(6, small(6), {})
    checkpoints.wait()
    assert checkpoints.read_record(5) == {"data": {"epoch": 1, "position": [2, 3]}, "loss": 0.1}
    found = checkpoints.read_manifest(5)
    assert found.step == 5 and found.tensors == arrays.describe(values(5))
    assert found.tensors["master/none"] == arrays.Tensor((0, 4), "float32")
    assert sum(entry.bytes for entry in found.files.values()) > sum(tensor.nbytes for tensor in found.tensors.values())


# --- in the background ---------------------------------------------------------------------------------------------


def test_the_state_may_be_donated_as_soon_as_save_returns(tmp_path):
    advance = jax.jit(lambda x: x * 2 + 1, donate_argnums=0)
    sharding = NamedSharding(MESHES["8"], PartitionSpec("b"))
    x = jax.device_put(np.arange(2**20, dtype=np.float32) % 97, sharding)
    x = advance(x)  # compiled, so that the next one follows the save at once
    checkpoints = Checkpoints(tmp_path, keep=4)
    expected = {}
    for step in range(3):
        expected[step] = np.array(x)
        checkpoints.save(step, {"x": x}, {})
        x = advance(x)
        jax.block_until_ready(x)
    checkpoints.wait()
    for step, value in expected.items():
        target = {"x": jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding)}
        assert_same(checkpoints.restore(target, step)[0], {"x": value})


def test_a_checkpoint_exists_from_its_commit_on_and_the_old_one_until_then(tmp_path, small, monkeypatch):
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, small(1), {}, wait=True)
    gate, seal = threading.Event(), manifest.seal
    monkeypatch.setattr(manifest, "seal", lambda *a: gate.wait(60) and seal(*a))
    checkpoints.save(2, small(2), {})
    assert checkpoints.latest() == 1 and checkpoints.steps() == [1]
    assert restored_value(Checkpoints(tmp_path)) == 1
    gate.set()
    checkpoints.wait()
    assert checkpoints.latest() == 2 and checkpoints.steps() == [2]
    assert names(tmp_path) == ["step_00000002-0002"]


def test_a_fault_of_the_program_in_the_background_surfaces_as_itself(tmp_path, small, monkeypatch):
    checkpoints = Checkpoints(tmp_path)
    monkeypatch.setattr(manifest, "seal", lambda *_: 1 / 0)
    checkpoints.save(1, small(1), {})
    with pytest.raises(ZeroDivisionError):
        checkpoints.close()
    checkpoints.close()  # once
    assert names(tmp_path) == []


# --- which ones stay -----------------------------------------------------------------------------------------------


@given(
    steps=st.lists(st.integers(0, 9), min_size=1, max_size=7),
    keep=st.integers(1, 3),
    every=st.sampled_from([0, 4]),
    scored=st.booleans(),
)
def test_what_stays_is_the_newest_the_regular_and_the_best(tmp_path_factory, steps, keep, every, scored):
    folder = tmp_path_factory.mktemp("keep")
    score = (lambda record: record["loss"]) if scored else None
    losses = {step: None if step % 5 == 2 else float((step * 7) % 10) for step in range(10)}
    kept: list[int] = []
    for step in steps:
        # a new object each time: what stays depends on the folder alone
        Checkpoints(folder, keep, keep_every=every, score=score).save(
            step, {"w": jnp.zeros(1)}, {"loss": losses[step]}, wait=True
        )
        kept = [s for s in kept if s != step] + [step]
        best = min((s for s in kept if losses[s] is not None), key=lambda s: losses[s], default=None)
        kept = [
            s
            for s in kept
            if s in kept[-keep:] or (every and s % every == 0) or (scored and best is not None and s == best)
        ]
        assert Checkpoints(folder).steps() == kept
        assert Checkpoints(folder).latest() == step


def test_a_run_that_went_back_resumes_where_it_went_on(tmp_path, small):
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (50, 100):
        checkpoints.save(step, small(step), {}, wait=True)
    assert restored_value(checkpoints, step=50) == 50
    checkpoints.save(60, small(60), {}, wait=True)
    assert checkpoints.latest() == 60 and checkpoints.steps() == [100, 60]
    assert restored_value(checkpoints) == 60


def test_a_step_saved_again_replaces_the_first_one(tmp_path, small):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(5, small(1), {"n": 1}, wait=True)
    checkpoints.save(5, small(2), {"n": 2}, wait=True)
    assert restored_value(checkpoints) == 2 and checkpoints.read_record(5) == {"n": 2}
    assert names(tmp_path) == ["step_00000005-0002"]


def test_unfinished_folders_are_not_read_and_go_with_the_next_save(tmp_path, small):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, small(1), {}, wait=True)
    (whole,) = tmp_path.iterdir()
    shutil.copytree(whole, tmp_path / "step_00000009-0007.saving")
    shutil.copytree(whole, tmp_path / "step_00000008-0006.removed")
    (tmp_path / "notes.saving").mkdir()  # somebody else's
    assert Checkpoints(tmp_path).latest() == 1 and Checkpoints(tmp_path).steps() == [1]
    assert len(names(tmp_path)) == 4
    Checkpoints(tmp_path).save(2, small(2), {}, wait=True)
    assert names(tmp_path) == ["notes.saving", "step_00000001-0001", "step_00000002-0008"]


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


def test_moving_the_damaged_folder_away_is_the_way_out(tmp_path, small):
    checkpoints = Checkpoints(tmp_path / "run")
    for step in (1, 2):
        checkpoints.save(step, small(step), {}, wait=True)
    delete(tmp_path / "run/step_00000002-0002/record.json", random.Random())
    with pytest.raises(UserError, match="move .*step_00000002-0002 away") as raised:
        restored_value(checkpoints)
    folder = str(raised.value).split("move ")[1].split(" away")[0]
    shutil.move(folder, tmp_path)
    assert restored_value(checkpoints) == 1


def test_damaged_checkpoints_do_not_count_among_those_kept(tmp_path, small):
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, small(1), {}, wait=True)
    shutil.copytree(tmp_path / "step_00000001-0001", tmp_path / "step_00000002-0002")  # says it is of step 1
    assert restored_value(checkpoints, fall_back=True) == 1
    checkpoints.save(2, small(20), {}, wait=True)  # the way on leads to the same step
    assert restored_value(checkpoints) == 20
    assert names(tmp_path) == ["step_00000002-0003"]


def test_fall_back_goes_as_far_back_as_it_must_and_no_further_than_there_is(tmp_path, small):
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


# --- what does not fit ---------------------------------------------------------------------------------------------


def with_leaf(**changes: Any) -> dict[str, Any]:
    tree = {f"w{i}": jax.ShapeDtypeStruct((4, 2), jnp.float32) for i in range(5)} | changes
    return {name: leaf for name, leaf in tree.items() if leaf is not None}


@pytest.mark.parametrize(
    "target, sentence",
    [
        (
            with_leaf(w1=jax.ShapeDtypeStruct((2, 4), jnp.float32)),
            "different: w1 (float32[4, 2] there, float32[2, 4] here).",
        ),
        (
            with_leaf(w1=jax.ShapeDtypeStruct((4, 2), jnp.bfloat16)),
            "different: w1 (float32[4, 2] there, bfloat16[4, 2] here).",
        ),
        (with_leaf(w1=None), "only there: w1."),
        (with_leaf(v=jax.ShapeDtypeStruct((4, 2), jnp.float32)), "not there: v."),
        (with_leaf(w1={"deeper": jax.ShapeDtypeStruct((4, 2), jnp.float32)}), "not there: w1/deeper; only there: w1."),
        ({"v": jax.ShapeDtypeStruct((), jnp.int32)}, "not there: v; only there: w0, w1, w2 and 2 more."),
    ],
)
def test_a_target_that_does_not_fit_is_told_by_its_tensors(tmp_path, target, sentence):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {f"w{i}": jnp.zeros((4, 2)) for i in range(5)}, {}, wait=True)
    with pytest.raises(UserError) as raised:
        checkpoints.restore(target)
    assert f"The checkpoint of step 1 in {tmp_path} does not fit the model here: {sentence}" in str(raised.value)


@pytest.mark.parametrize("state", [{"w": np.zeros(2)}, {"w": 1.0}, {"w": jax.random.key(0)}])
def test_only_arrays_of_numbers_are_saved(tmp_path, state):
    with pytest.raises(TypeError, match="^w: "):
        Checkpoints(tmp_path / "new").save(1, state, {})
    assert not (tmp_path / "new").exists()


def test_a_record_that_json_cannot_hold_is_refused_before_anything_is_written(tmp_path, small):
    with pytest.raises(TypeError):
        Checkpoints(tmp_path / "new").save(1, small(1), {"path": tmp_path})
    assert not (tmp_path / "new").exists()


def test_names_that_would_be_one_are_refused(tmp_path):
    with pytest.raises(ValueError, match="names of their own"):
        Checkpoints(tmp_path).save(1, {"a/b": jnp.zeros(1), "a": {"b": jnp.ones(1)}}, {})
    with pytest.raises(ValueError, match="names of their own"):
        Checkpoints(tmp_path).save(1, jnp.zeros(1), {})


# --- what the file system refuses ----------------------------------------------------------------------------------


def test_absent_checkpoints_are_told(tmp_path, small):
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


def test_a_file_in_place_of_the_folder_is_told(tmp_path, small):
    (tmp_path / "checkpoints").write_text("")
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    with pytest.raises(UserError, match="checkpoints cannot be read .not a directory.*"):
        checkpoints.latest()
    with pytest.raises(UserError, match="step 1 could not be saved: .*checkpoints cannot be written .file exists.*"):
        checkpoints.save(1, small(1), {})


@pytest.mark.parametrize("code, words", [(errno.EROFS, "read-only file system"), (errno.EACCES, "permission denied")])
def test_a_read_only_folder_is_told_at_once_and_the_old_checkpoint_stays(tmp_path, small, monkeypatch, code, words):
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
def test_a_full_disk_is_told_and_leaves_the_old_checkpoint_and_no_debris(tmp_path, small, monkeypatch, make_full):
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


def test_a_write_that_the_system_refuses_halfway_is_told_in_one_sentence_only(tmp_path, capfd):
    """The real way through TensorStore: no file may grow beyond 64 KiB while the second checkpoint is written."""
    logging.getLogger("absl").addHandler(shown := logging.StreamHandler(sys.stderr))
    big = {f"w{i}": jnp.arange(2**16, dtype=jnp.float32) + i for i in range(4)}
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


def test_an_old_checkpoint_that_cannot_be_removed_does_not_fail_the_new_one(tmp_path, small, monkeypatch, caplog):
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


# --- more than one process -----------------------------------------------------------------------------------------

SAVING_LOOP = """
import os, sys, time, random, signal
import jax
import jax.numpy as jnp
from moejax.checkpoint.manager import Checkpoints

folder, lives = sys.argv[1], int(sys.argv[2])
rng = random.Random(3)

def live():  # a training run: take up the newest, go on from it
    checkpoints, target = Checkpoints(folder, keep=2), {name: jax.ShapeDtypeStruct((64, 64), "float32") for name in "abc"}
    step = checkpoints.latest() or 0
    if step:
        state, record = checkpoints.restore(target)
        if record != {"step": step} or any(float(x.min()) != step or float(x.max()) != step for x in state.values()):
            os._exit(3)
    while True:
        step += 1
        checkpoints.save(step, {name: jnp.full((64, 64), step, jnp.float32) for name in target}, {"step": step})

for _ in range(lives):  # imported once, no device touched yet: each child starts JAX for itself
    child = os.fork()
    if not child:
        live()
    time.sleep(0.8 + rng.random() * 0.7)
    os.kill(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(code, sorted(os.listdir(folder)), flush=True)
"""


def start(program: str, *arguments: Any, **environment: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", program, *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.slow
def test_a_kill_at_any_moment_leaves_the_newest_checkpoint_whole(tmp_path):
    lives = 5
    output, _ = start(SAVING_LOOP, tmp_path, lives).communicate(timeout=120)
    codes = [line.split()[0] for line in output.splitlines()]
    assert codes == ["-9"] * lives, output  # 3: a life found a state that is not what its step wrote
    checkpoints = Checkpoints(tmp_path)
    step = checkpoints.latest()
    assert step is not None and step > lives, output
    state, record = checkpoints.restore({name: jax.ShapeDtypeStruct((64, 64), jnp.float32) for name in "abc"})
    assert record == {"step": step}
    assert_same(state, {name: np.full((64, 64), step, np.float32) for name in "abc"})


ONE_OF_TWO = """
import json, sys
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from moejax.checkpoint.manager import Checkpoints
from moejax.errors import UserError

folder, port, process = sys.argv[1], sys.argv[2], int(sys.argv[3])
jax.config.update("jax_num_cpu_devices", 2)
jax.distributed.initialize(f"localhost:{port}", 2, process)
mesh = Mesh(np.array(jax.devices()), ("x",))
value = np.arange(48, dtype=np.float32).reshape(4, 12)

def target(*spec):
    return {"w": jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=NamedSharding(mesh, P(*spec)))}

def put(x, *spec):
    return jax.make_array_from_callback(x.shape, NamedSharding(mesh, P(*spec)), lambda index: x[index])

checkpoints = Checkpoints(folder, keep=2)
for step in (1, 2, 3):
    checkpoints.save(step, {"w": put(value + step, "x"), "n": put(np.int32(step))}, {"step": step})
checkpoints.wait()
assert checkpoints.steps() == [2, 3], checkpoints.steps()
state, record = checkpoints.restore(target(None, "x"), subset=True)
assert record == {"step": 3}
for shard in state["w"].addressable_shards:
    np.testing.assert_array_equal(shard.data, (value + 3)[shard.index])
if process == 0:  # one file: one process finds it, both must say so
    name = next(n for n in sorted(checkpoints.read_manifest(3).files) if "process_1/d/" in n)
    path = checkpoints._find(3)[0].path / name
    path.write_bytes(path.read_bytes()[:-1])
from jax.experimental import multihost_utils
multihost_utils.sync_global_devices("damaged")
try:
    checkpoints.restore(target("x"), subset=True)
except UserError as error:
    print(error)
"""


@pytest.mark.slow
def test_two_processes_write_and_read_one_checkpoint(tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    both = [start(ONE_OF_TWO, tmp_path, port, process) for process in range(2)]
    outputs = [process.communicate(timeout=120)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    for output in outputs:
        assert "of step 3 cannot be used: in" in output and "ocdbt.process_1/d/" in output, output
        assert "is truncated" in output and "The checkpoint of step 2, saved before it, is whole" in output
    # and one process alone takes it up
    value = np.arange(48, dtype=np.float32).reshape(4, 12) + 2
    sharding = NamedSharding(MESHES["8"], PartitionSpec())
    target = {"w": jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding)}
    assert_same(Checkpoints(tmp_path).restore(target, 2, subset=True)[0], {"w": value})
