"""A native Olmo-core 3 checkpoint: the golden's logits, its moments and its step, and on from there.

$MOEJAX_OLMO_CORE_CKPT names another checkpoint (default: ../shared/golden_olmo_core_checkpoint/step7 beside the
checkout); the logits and masters are compared where $MOEJAX_GOLDEN_DIR has the golden it was made from,
report_recipe.npz.
"""

import dataclasses
import json
import os
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax import convert
from moejax.checkpoint import olmo_core
from moejax.checkpoint.olmo_core_config import import_trainer_config
from moejax.checkpoint.olmo_core_folder import OlmoCoreFolder
from moejax.checkpoint.saved_model import SavedModel, abstract_state
from moejax.errors import UserError
from moejax.mesh import MeshShape, make_mesh
from moejax.models.transformer import Transformer, abstract_params
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
    state, _ = saved.checkpoints.restore(abstract_state(abstract_params(given.model), given.roles), subset=True)
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


# --- the config.json of a training run -------------------------------------------------------------------------------

NN = "olmo_core.nn"


def trainer_config(**changes) -> dict:
    """As `ConfigSaverCallback` of Olmo-core 3.0.0 writes it for the model of SETTINGS. changes: by dotted name."""
    s = SETTINGS
    norm = {
        "name": "rms",
        "eps": 1e-6,
        "bias": False,
        "dtype": "float32",
        "_CLASS_": f"{NN}.layer_norm.LayerNormConfig",
    }
    rope = {"name": "default", "theta": 500_000, "full_precision": True, "no_global_rope": False}
    mixer = {"name": "default", "n_heads": s["heads"], "n_kv_heads": s["kv"], "head_dim": s["head_dim"], "bias": False}
    mixer |= {"rope": {**rope, "partial_rotary_factor": 1.0}, "qk_norm": norm, "use_head_qk_norm": True}
    mixer |= {"backend": "flash_4", "dtype": "float32", "scalable_softmax": False, "attention_sinks": False}
    experts = {"d_model": s["d"], "bias": False, "dtype": "float32", "activation": "swiglu"}
    router = {"d_model": s["d"], "num_experts": s["experts"], "top_k": s["top_k"], "bias": False}
    router |= {"normalize_expert_weights": 1.0, "restore_weight_scale": True, "gating_function": "softmax"}
    router |= {"lb_loss_weight": 0.005, "z_loss_weight": 2e-4, "lb_loss_granularity": "local_batch"}
    router |= {"sigmoid_stability_epsilon": 1e-7, "random_expert_assignment": False}
    block = {"name": "moe_fused_v2", "sequence_mixer": {**mixer, "type": "attention"}, "layer_norm": norm}
    block |= {"use_peri_norm": True, "use_pre_norm": False, "checkpoint_attn": False, "ep": {"capacity_factor": 1.25}}
    wide = {**experts, "hidden_size": (s["top_k"] + 1) * s["hidden"], "num_experts": 1}
    routed = {**experts, "hidden_size": s["hidden"], "num_experts": s["experts"], "activation_alpha": 1.702}
    moe = {**block, "routed_experts": routed, "routed_experts_router": router}
    moe["shared_experts"] = {**experts, "hidden_size": s["hidden"], "num_experts": 1}
    model = {"d_model": s["d"], "vocab_size": s["vocab"], "n_layers": s["layers"], "block": moe}
    model |= {"block_overrides": {"0": {**block, "shared_experts": wide}}, "embed_scale": 4.0, "embedding_norm": norm}
    model |= {"lm_head": {"name": "default", "layer_norm": norm, "bias": False, "loss_implementation": "default"}}
    model |= {"name": "moe_fused_v2", "init_std": 0.01, "init_seed": 2026, "recompute_each_block": True}
    config = {"model": model, "train_module": {"z_loss_multiplier": 1e-4, "rank_microbatch_size": 8192}, "trainer": {}}
    config = json.loads(json.dumps(config))
    for name, value in changes.items():
        *path, last = name.split(".")
        at = config
        for key in path:
            at = at[key]
        at[last] = value
    return config


def test_a_training_runs_config_describes_the_same_model():
    ours = import_trainer_config(trainer_config())
    wanted = olmo_core.import_model_config(SETTINGS)
    assert ours.dense_width == wanted.dense_width and ours.embed_scale == wanted.d_model**0.5
    assert dataclasses.replace(ours, dense_hidden=None, embed_scale=None) == wanted


def test_blocks_by_name_windows_and_pools_are_taken_over():
    config = trainer_config(
        **{
            "model.block.sequence_mixer.sliding_window": {"pattern": [4, -1]},
            "model.block_overrides.0.sequence_mixer.sliding_window": {"pattern": [4, -1]},
            "model.block.routed_experts_router.emo": {
                "eos_token_id": 0,
                "min_document_expert_pool": 2,
                "max_document_expert_pool": 4,
            },
        }
    )
    model = config["model"]
    overridden = import_trainer_config(config)
    assert overridden.windows == (-1, 4, -1) and overridden.moe.router.pool.largest == 4
    blocks = {"dense": model.pop("block_overrides")["0"], "moe": model["block"]}
    model |= {"block": blocks, "block_pattern": ["dense", "moe", "moe"]}
    assert import_trainer_config(config) == overridden


def test_a_run_folder_gives_its_newest_step(tmp_path: Path):
    for step in (3, 12):
        made(tmp_path / f"step{step}")
    for step in (3, 12, 40):  # the last has no checkpoint yet
        (tmp_path / f"step{step}").mkdir(exist_ok=True)
        (tmp_path / f"step{step}" / "config.json").write_text(json.dumps(trainer_config()))
    folder = OlmoCoreFolder(tmp_path)
    assert folder.path == tmp_path / "step12" / "model_and_optim" and folder.roles[1] == "first_moment"
    assert folder.model == import_trainer_config(trainer_config())
    assert convert.main(["olmo-core", str(tmp_path), str(tmp_path / "run")]) == 0
    assert SavedModel(tmp_path / "run").step == 9


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model.name", "default"),
        ("model.freeze_params", ["embeddings.*"]),
        ("model.block.latent_moe", {"latent_dim": 8}),
        ("model.block.feed_forward_residual_alpha", 0.5),
        ("model.block.sequence_mixer.gate", {"granularity": "headwise"}),
        ("model.block.sequence_mixer.attention_sinks", True),
        ("model.block.sequence_mixer.rope.no_global_rope", True),
        ("model.block.sequence_mixer.rope.scaling", {"factor": 8}),
        ("model.block.sequence_mixer.qk_norm_per_head_gains", True),
        ("model.block.routed_experts.activation", "relu2"),
        ("model.block.routed_experts.bias", True),
        ("model.block.shared_experts.num_experts", 2),
        ("model.block.routed_experts_router.orth_loss_weight", 0.1),
        ("model.block.layer_norm.name", "qwen_rms"),
        ("model.lm_head.bias", True),
        ("model.a_later_option", 3),
    ],
)
def test_options_of_a_training_run_without_counterpart_are_refused_by_name(name, value):
    with pytest.raises(UserError, match=f"{re.escape(name)}=.* has no counterpart in moejax"):
        import_trainer_config(trainer_config(**{name: value}))


def test_layers_that_differ_are_refused():
    config = trainer_config()
    overrides = config["model"]["block_overrides"]
    overrides["2"] = overrides["0"]
    with pytest.raises(UserError, match="layer 2 of 3 dense behind one with experts"):
        import_trainer_config(config)
    overrides["2"] = json.loads(json.dumps(config["model"]["block"]))
    overrides["2"]["routed_experts_router"]["top_k"] = 1
    with pytest.raises(UserError, match="in layer 2 another block than in layer 1"):
        import_trainer_config(config)
    with pytest.raises(UserError, match=r"norms of different eps, \[1e-06, 1e-05\]"):
        import_trainer_config(trainer_config(**{"model.lm_head.layer_norm.eps": 1e-5}))
    with pytest.raises(UserError, match="lacks model.n_layers"):
        import_trainer_config(trainer_config(**{"model.n_layers": None}))


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
