"""Checkpoints: bit for bit onto any mesh, saved in the background, the right ones kept, misfits told by name."""

import shutil
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from moejax.checkpoint import arrays, manifest
from moejax.checkpoint.manager import Checkpoints
from moejax.errors import UserError
from tests.checkpoint.states import (
    MESHES,
    State,
    assert_same,
    names,
    restored_value,
    small,
    state_on,
    target_on,
    values,
)

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


def test_the_record_and_the_manifest_can_be_read_without_the_arrays(tmp_path):
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


def test_a_checkpoint_exists_from_its_commit_on_and_the_old_one_until_then(tmp_path, monkeypatch):
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


def test_a_fault_of_the_program_in_the_background_surfaces_as_itself(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path)
    monkeypatch.setattr(manifest, "seal", lambda *_: 1 / 0)
    checkpoints.save(1, small(1), {})
    with pytest.raises(ZeroDivisionError):
        checkpoints.close()
    checkpoints.close()  # once
    assert names(tmp_path) == []


# --- which ones stay -----------------------------------------------------------------------------------------------


@example(steps=[2, 7], keep=1, every=0, scored=True)  # none has a score
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


def test_a_run_that_went_back_resumes_where_it_went_on(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (50, 100):
        checkpoints.save(step, small(step), {}, wait=True)
    assert restored_value(checkpoints, step=50) == 50
    checkpoints.save(60, small(60), {}, wait=True)
    assert checkpoints.latest() == 60 and checkpoints.steps() == [100, 60]
    assert restored_value(checkpoints) == 60


def test_a_step_saved_again_replaces_the_first_one(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(5, small(1), {"n": 1}, wait=True)
    checkpoints.save(5, small(2), {"n": 2}, wait=True)
    assert restored_value(checkpoints) == 2 and checkpoints.read_record(5) == {"n": 2}
    assert names(tmp_path) == ["step_00000005-0002"]


def test_unfinished_folders_are_not_read_and_go_with_the_next_save(tmp_path):
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


def test_a_record_that_json_cannot_hold_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(TypeError):
        Checkpoints(tmp_path / "new").save(1, small(1), {"path": tmp_path})
    assert not (tmp_path / "new").exists()


def test_names_that_would_be_one_are_refused(tmp_path):
    with pytest.raises(ValueError, match="names of their own"):
        Checkpoints(tmp_path).save(1, {"a/b": jnp.zeros(1), "a": {"b": jnp.ones(1)}}, {})
    with pytest.raises(ValueError, match="names of their own"):
        Checkpoints(tmp_path).save(1, jnp.zeros(1), {})
