"""A native Olmo-core 3 checkpoint: the golden's logits, its moments and its step, and on from there.

$MOEJAX_OLMO_CORE_CKPT names another checkpoint (default: ../shared/golden_olmo_core_checkpoint/step7 beside the
checkout); the logits and masters are compared where $MOEJAX_GOLDEN_DIR has the golden it was made from,
report_recipe.npz.
"""

import json
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax import convert
from moejax.checkpoint import olmo_core
from moejax.checkpoint.olmo_core_folder import OlmoCoreFolder
from moejax.checkpoint.saved_model import SavedModel, abstract_state
from moejax.errors import UserError
from moejax.mesh import MeshShape, make_mesh
from moejax.models.transformer import Transformer
from moejax.parallel.step import TrainProgram
from tests.checkpoint.foreign import write_distcp

ROOT = Path(__file__).parents[2]
GIVEN = Path(os.environ.get("MOEJAX_OLMO_CORE_CKPT", ROOT.parent / "shared/golden_olmo_core_checkpoint/step7"))
GOLDEN = Path(os.environ.get("MOEJAX_GOLDEN_DIR", ROOT.parent / "shared" / "golden")) / "report_recipe.npz"
SETTINGS = dict(d=16, heads=2, kv=1, head_dim=8, layers=3, experts=4, top_k=2, hidden=8, vocab=32)


@pytest.fixture(scope="module")
def given() -> OlmoCoreFolder:
    if not GIVEN.exists():
        pytest.skip(f"no Olmo-core checkpoint at {GIVEN}; name one in MOEJAX_OLMO_CORE_CKPT")
    return OlmoCoreFolder(GIVEN)


def test_the_goldens_logits(given: OlmoCoreFolder):
    if not GOLDEN.exists() or "MOEJAX_OLMO_CORE_CKPT" in os.environ:
        pytest.skip(f"no golden to compare with ({GOLDEN})")
    golden = np.load(GOLDEN)
    logits = Transformer(given.model, given.import_params())(jnp.asarray(golden["ids"], jnp.int32))
    np.testing.assert_allclose(logits, golden["logits"], rtol=0, atol=2e-5)


def test_the_run_has_masters_moments_and_step(given: OlmoCoreFolder, tmp_path: Path):
    assert convert.main(["olmo-core", str(GIVEN), str(tmp_path / "run")]) == 0
    saved = SavedModel(tmp_path / "run")
    assert saved.step == given.step > 0
    state, _ = saved.checkpoints.restore(abstract_state(given.model, given.roles), subset=True)
    for role in ("master", "first_moment", "second_moment"):
        jax.tree.map(np.testing.assert_array_equal, state[role], given.import_params(role))
    target = TrainProgram(saved.config, make_mesh(MeshShape())).portable_target()
    portable, _ = saved.checkpoints.restore(target)  # a training run takes it up whole
    assert int(portable.step) == given.step


def made(folder: Path, *, moments: bool = True, fused: bool = False, chunks: int = 1, **more) -> Path:
    """A checkpoint of a small model with every tensor of its own numbers, and those the trainer adds."""
    model, rng = olmo_core.import_model_config(SETTINGS), np.random.default_rng(0)
    tensors = {}
    for piece in olmo_core.pieces(model, fused=fused):
        for ending in ("main", "exp_avg", "exp_avg_sq") if moments else ("main",):
            tensors[f"module.{piece.name}.{ending}"] = rng.normal(size=int(np.prod(piece.shape))).astype(np.float32)
        tensors[f"module.{piece.name}.step"] = np.float32(9).reshape(())
    write_distcp(folder / "model_and_optim", tensors | more, files=2, chunks=chunks)
    (folder / "config.json").write_text(json.dumps(SETTINGS))
    return folder


@pytest.mark.parametrize("fused, chunks", [(False, 1), (True, 3)])
def test_all_shards_and_both_attention_layouts(tmp_path: Path, fused: bool, chunks: int):
    folder = OlmoCoreFolder(made(tmp_path / "step9", fused=fused, chunks=chunks))
    assert folder.step == 9 and folder.roles == ("master", "first_moment", "second_moment")
    state = folder.import_state()
    experts = state["first_moment"]["moe_blocks"]["moe"]["experts"]["w_up_gate"]
    flat = folder.read("first_moment", "blocks.2.routed_experts.w_up_gate")
    np.testing.assert_array_equal(experts[1], flat.reshape(4, 16, 16).swapaxes(1, 2))


def test_without_moments_it_starts_at_step_0(tmp_path: Path):
    folder = OlmoCoreFolder(made(tmp_path / "step9", moments=False))
    assert folder.roles == ("master",) and folder.step == 0


def test_refusals(tmp_path: Path):
    bias = {"model_buffer.blocks.1.routed_experts_router.score_bias": np.ones(4, np.float32)}
    with pytest.raises(UserError, match="no place for"):
        OlmoCoreFolder(made(tmp_path / "a", **bias))
    with pytest.raises(UserError, match="no place for, such as blocks.7.extra"):
        OlmoCoreFolder(made(tmp_path / "b", **{"module.blocks.7.extra.main": np.ones(4, np.float32)}))
    with pytest.raises(UserError, match="different steps"):
        OlmoCoreFolder(made(tmp_path / "c", **{"module.embeddings.weight.step": np.float32(3).reshape(())}))
    folder = made(tmp_path / "d")
    (folder / "config.json").unlink()
    with pytest.raises(UserError, match="has no config.json"):
        OlmoCoreFolder(folder)
