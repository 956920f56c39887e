"""A run that changes mesh, transport, schedule and precision on its way: it goes on as the run that never did.

20 steps on one device ---------------------------------------------------> losses, weights, moments
8 on dp=2,ep=2,pp=2 under 1F1B --> 6 on ep=4 --> 6 on one device ---------> the same, to rounding
"""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from moejax import config_io
from moejax.checkpoint.manager import Checkpoints
from moejax.observe.jsonl import read_metrics
from moejax.trainer import Trainer
from tests.runs import main, run_arguments

COMMON = ("model.n_layers=3", "model.n_dense_layers=1", "train.eval_batches=0", "checkpoint.keep=9", "run.log_every=10")
LEGS = [
    ("dp=2,ep=2,pp=2", 8, ("parallel.experts.transport=rowwise",)),
    ("ep=4", 14, ("parallel.experts.transport=all_gather", "parallel.pipeline.microbatches=2")),
    ("dp=1", 20, ()),
]
TOLERANCE = 1e-5  # relative, of each loss


def load(arguments: list[str], mesh: str, *overrides: str) -> Any:
    return config_io.load(None, [*arguments, f"parallel.mesh='{mesh}'", *overrides])


def saved_arrays(folder: Path) -> dict[str, np.ndarray]:
    """Weights and moments of the newest checkpoint, as they are on disk."""
    checkpoints = Checkpoints(folder / "checkpoints")
    last = checkpoints.latest()
    assert last is not None
    tensors = checkpoints.read_manifest(last).tensors
    target = {name: jax.ShapeDtypeStruct(t.shape, np.dtype(t.dtype)) for name, t in tensors.items()}
    nested: dict[str, Any] = {}
    for name, leaf in target.items():
        *path, key = name.split("/")
        at = nested
        for part in path:
            at = at.setdefault(part, {})
        at[key] = leaf
    state, _ = checkpoints.restore(nested)
    return {jax.tree_util.keystr(p): np.asarray(x) for p, x in jax.tree_util.tree_leaves_with_path(state)}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], Path, Path]:
    """Arguments of the run that changed, its folder, and that of the run on one device."""
    folder = tmp_path_factory.mktemp("mesh_change")
    arguments = run_arguments(folder, *COMMON)
    assert main([*arguments, "run.name=unbroken"]) == 0
    for mesh, steps, more in LEGS:
        # the schedule of the learning rate is constant, so the number of steps is no part of the mathematics
        assert main([*arguments, "--mesh", mesh, f"train.steps={steps}", *more]) == 0
    return arguments, folder / "runs" / "small", folder / "runs" / "unbroken"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_loss_trace_follows_the_unbroken_run(runs):
    _, changed, unbroken = runs
    ours, theirs = read_metrics(changed), read_metrics(unbroken)
    assert [record["step"] for record in ours] == [record["step"] for record in theirs] == list(range(1, 21))
    losses = [[record["loss"] for record in records] for records in (ours, theirs)]
    np.testing.assert_allclose(*losses, rtol=TOLERANCE)
    assert losses[1][0] > 1.5 * losses[1][-1]  # there was something to follow


@pytest.mark.slow
def test_weights_and_moments_follow_it_too(runs):
    _, changed, unbroken = runs
    ours, theirs = saved_arrays(changed), saved_arrays(unbroken)
    assert ours.keys() == theirs.keys() and any("second_moment" in name for name in ours)
    for name, array in theirs.items():
        error = np.linalg.norm(ours[name].astype(np.float64) - array) / max(float(np.linalg.norm(array)), 1e-30)
        assert error <= 1e-3, f"{name}: {error:.1e}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "overrides"),
    [
        ("dp=2,pp=3", ("parallel.pipeline.schedule=zero_bubble", "parallel.pipeline.stash=residuals")),
        ("ep=2", ("precision.params=bfloat16", "precision.compute=bfloat16", "parallel.experts.transport=all_to_all")),
    ],
)
def test_taken_up_elsewhere_the_state_is_the_same_bits(runs, mesh, overrides):
    """Another schedule, transport or precision: what a checkpoint holds comes back unchanged, moments too."""
    arguments, changed, _ = runs
    saved = saved_arrays(changed)
    with Trainer(load([*arguments, "train.steps=20"], mesh, *overrides)) as trainer:
        assert trainer.resumed_from == 20
        portable = trainer.program.portable(trainer.state)._asdict()
        working = {leaf.dtype.name for leaf in jax.tree.leaves(trainer.state.params)}
    found = {jax.tree_util.keystr(p): np.asarray(x) for p, x in jax.tree_util.tree_leaves_with_path(portable)}
    assert found.keys() == saved.keys()
    for name, array in saved.items():
        assert found[name].tobytes() == array.tobytes(), name
    assert working == {"bfloat16" if "precision.params=bfloat16" in overrides else "float32"}
