"""Numbers computed by the released Olmo-core 3.0.0: logits, loss, every gradient, and ten AdamW steps.

Runs over every .npz in $MOEJAX_GOLDEN_DIR (default: ../shared/golden beside the checkout, else the fixtures kept here).
Settings and weights come through the public importer, the step is the one that training runs.
"""

import json
import os
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax import config as c
from moejax.checkpoint.olmo_core import import_model_config, import_params, import_score_bias
from moejax.mesh import MeshShape, make_mesh
from moejax.models.transformer import Transformer
from moejax.moe.statistics import RouterStatistics
from moejax.parallel.step import TrainProgram

ROOT = Path(__file__).parents[2]
GIVEN = Path(os.environ.get("MOEJAX_GOLDEN_DIR", ROOT.parent / "shared" / "golden"))
FIXTURES = Path(__file__).parents[1] / "fixtures" / "golden"
GOLDENS = sorted(GIVEN.glob("*.npz")) or sorted(FIXTURES.glob("*.npz"))


def named(arrays: dict[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    return {name.removeprefix(prefix): value for name, value in arrays.items() if name.startswith(prefix)}


class Golden:
    def __init__(self, path: Path):
        self.arrays = dict(np.load(path))
        self.model = import_model_config(json.loads(str(self.arrays["config"])))
        self.params = import_params(self.model, named(self.arrays, "param/"))
        self.score_bias = import_score_bias(self.model, named(self.arrays, "buffer/"))
        ids = self.arrays["ids"]
        self.batch = {
            "tokens": ids,
            "labels": self.arrays["labels"],
            "segment_ids": np.zeros_like(ids),
            "positions": np.broadcast_to(np.arange(ids.shape[1]), ids.shape),
        }

    def program(self) -> TrainProgram:
        """The optimizer of the trace: lr 1e-2, decay 0.1 on matrices (the embedding too), clip 1."""
        rows, length = self.arrays["ids"].shape
        config = c.Config(
            model=self.model,
            precision=c.PrecisionConfig(c.Dtype.float32, c.Dtype.float32),
            data=c.DataConfig(sequence_length=length),
            train=c.TrainConfig(steps=100, batch_tokens=rows * length),
            parallel=c.ParallelConfig(pipeline=c.PipelineConfig(microbatches=1)),
            optimizer=c.OptimizerConfig(
                learning_rate=1e-2,
                decay_embeddings=True,
                schedule=c.LRScheduleConfig(kind=c.LRSchedule.constant, warmup_steps=0),
            ),
        )
        return TrainProgram(c_validated(config), make_mesh(MeshShape()))


def c_validated(config: c.Config) -> c.Config:
    return c.validate(replace(config))


@pytest.fixture(params=GOLDENS, ids=lambda path: path.stem, scope="module")
def golden(request: pytest.FixtureRequest) -> Golden:
    return Golden(request.param)


def test_there_are_goldens():
    assert GOLDENS, f"no .npz in {GIVEN} or {FIXTURES}"


def test_logits(golden: Golden):
    model = Transformer(golden.model, golden.params, score_bias=golden.score_bias)
    logits = model(jnp.asarray(golden.arrays["ids"], jnp.int32))
    np.testing.assert_allclose(logits, golden.arrays["logits"], rtol=0, atol=2e-5)


def test_loss_and_gradients(golden: Golden):
    program = golden.program()
    state = program.with_params(golden.params, golden.score_bias)
    batch = program.place_batch(golden.batch)
    gradients, totals, tokens = jax.jit(program.gradients)(state.params, batch, jax.random.key(0), state.score_bias)
    cross_entropy, z = totals.cross_entropy / tokens, golden.model.z_loss * totals.z / tokens
    np.testing.assert_allclose(cross_entropy, golden.arrays["ce"], rtol=1e-6)
    np.testing.assert_allclose(cross_entropy + z, golden.arrays["loss"], rtol=1e-6)
    expected = import_params(golden.model, named(golden.arrays, "grad/"))

    def close(path, ours, theirs):
        error = np.linalg.norm(np.asarray(ours) - theirs) / np.linalg.norm(theirs)
        assert error <= 1e-4, f"{jax.tree_util.keystr(path)}: relative L2 error {error:.2e}"

    jax.tree_util.tree_map_with_path(close, gradients, expected)


def check_balance(golden: Golden, routing: RouterStatistics) -> None:
    theirs = named(golden.arrays, "metric/")
    counts = np.asarray(routing.counts)
    for row, layer in enumerate(range(golden.model.n_dense_layers, golden.model.n_layers)):
        block = f"block {layer:02d}/"
        np.testing.assert_allclose(routing.balance[row], theirs[block + "load balancing loss unscaled"], rtol=1e-5)
        np.testing.assert_allclose(routing.z[row], theirs[block + "router Z loss unscaled"], rtol=1e-5)
        np.testing.assert_allclose(counts[row].max() / counts[row].mean(), theirs[block + "load imbalance"], rtol=1e-6)


def test_ten_steps(golden: Golden):
    """The trace of losses, and at its first step the original's own balance metrics from our routing statistics."""
    program = golden.program()
    state = program.with_params(golden.params, golden.score_bias)
    batch = program.place_batch(golden.batch)
    losses = []
    for step in range(len(golden.arrays["trace"])):
        state, metrics = program.step(state, batch)
        losses.append(float(metrics.loss))
        if step == 0:
            check_balance(golden, jax.device_get(metrics.routing))
    # a flipped route changes a trace by 5e-3 late on: the originals' own do
    np.testing.assert_allclose(losses[:3], golden.arrays["trace"][:3], rtol=0, atol=1e-3)
    np.testing.assert_allclose(losses, golden.arrays["trace"], rtol=0, atol=2e-2)
