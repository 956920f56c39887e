"""Hugging Face checkpoints against what transformers computes from them, and back out unchanged.

Runs over every folder in $MOEJAX_HF_GOLDEN_DIR (default: ../shared/golden_hf beside the checkout) and over those in
tests/fixtures/golden_hf (qwen2_moe; made by transformers 5.12.1, 2026-11). Each holds config.json, model.safetensors
and expected.npz: ids, logits, loss (mean next-token cross entropy), grad_norm (global L2).
"""

import json
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file

from moejax import convert
from moejax.checkpoint.huggingface import HFFolder
from moejax.checkpoint.saved_model import SavedModel
from moejax.models.transformer import Transformer

ROOT = Path(__file__).parents[2]
GIVEN = Path(os.environ.get("MOEJAX_HF_GOLDEN_DIR", ROOT.parent / "shared" / "golden_hf"))
FIXTURES = Path(__file__).parents[1] / "fixtures" / "golden_hf"
GOLDENS = sorted(path.parent for folder in (GIVEN, FIXTURES) for path in folder.glob("*/expected.npz"))


class Golden:
    def __init__(self, path: Path):
        self.path, self.arrays = path, dict(np.load(path / "expected.npz"))
        self.folder = HFFolder(path)
        self.model, self.params = self.folder.model, self.folder.import_params()


@pytest.fixture(params=GOLDENS, ids=lambda path: path.name, scope="module")
def golden(request: pytest.FixtureRequest) -> Golden:
    return Golden(request.param)


def test_logits(golden: Golden):
    logits = Transformer(golden.model, golden.params)(jnp.asarray(golden.arrays["ids"], jnp.int32))
    np.testing.assert_allclose(logits, golden.arrays["logits"], rtol=0, atol=2e-5)


def test_loss_and_gradient_norm(golden: Golden):
    ids = jnp.asarray(golden.arrays["ids"], jnp.int32)

    def loss(params):
        logits = Transformer(golden.model, params)(ids)
        return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], ids[:, 1:]).mean()

    value, gradients = jax.jit(jax.value_and_grad(loss))(golden.params)
    np.testing.assert_allclose(value, golden.arrays["loss"], rtol=1e-5)
    padding = golden.folder.config.get("pad_token_id")
    if (
        padding is not None and not golden.model.tie_embeddings
    ):  # torch's Embedding keeps the gradient of this row at zero
        gradients["embedding"]["table"] = gradients["embedding"]["table"].at[padding].set(0.0)
    np.testing.assert_allclose(optax.global_norm(gradients), golden.arrays["grad_norm"], rtol=1e-5)


def test_there_and_back(golden: Golden, tmp_path: Path):
    """Import, export, import: tensors and config of the export are the source's, weights the same bits."""
    run, out, again = tmp_path / "run", tmp_path / "out", tmp_path / "again"
    given = str(golden.path / "expected.npz")
    assert convert.main(["hf", str(golden.path), str(run), "--verify", given]) == 0
    assert convert.main(["to-hf", str(run), str(out), "--verify", given]) == 0
    source, exported = (load_file(folder / "model.safetensors") for folder in (golden.path, out))
    assert source.keys() == exported.keys()
    for name, tensor in source.items():
        assert tensor.dtype == exported[name].dtype and tensor.tobytes() == exported[name].tobytes(), name
    assert json.loads((out / "config.json").read_text()) == json.loads((golden.path / "config.json").read_text())
    assert convert.main(["hf", str(out), str(again)]) == 0
    first, second = SavedModel(run).params(), SavedModel(again).params()
    jax.tree.map(np.testing.assert_array_equal, first, second)


def test_there_are_goldens():
    assert any(path.parent == FIXTURES for path in GOLDENS), FIXTURES
    if not any(path.parent == GIVEN for path in GOLDENS):
        pytest.skip(f"no golden checkpoints in {GIVEN}; name their folder in MOEJAX_HF_GOLDEN_DIR")
