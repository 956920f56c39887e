"""Hugging Face folders: tables that cover every weight once, any sharding, any dtype, and refusals that name what is
wrong."""

import json
import math
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from moejax import convert
from moejax.accounting import parameter_counts
from moejax.checkpoint import hf_config, hf_names, mapping, olmo_core
from moejax.checkpoint.arrays import named_leaves
from moejax.checkpoint.huggingface import HFFolder
from moejax.checkpoint.saved_model import SavedModel
from moejax.config import Config
from moejax.errors import UserError
from moejax.mesh import make_mesh, parse_mesh
from moejax.models.transformer import abstract_params
from moejax.parallel.inference import InferenceProgram
from tests.checkpoint.foreign import CONFIGS, hf_settings, hf_tensors, write_hf


def tables():
    for kind in CONFIGS:
        model = hf_config.import_config(hf_settings(kind))
        yield pytest.param(model, hf_names.pieces(kind, model), id=kind)
    model = hf_config.import_config(hf_settings("olmo3moe"))
    for fused in (False, True):
        yield pytest.param(model, olmo_core.pieces(model, fused=fused), id=f"olmo_core-fused={fused}")


@pytest.mark.parametrize("model, table", list(tables()))
def test_every_element_has_exactly_one_place(model, table):
    counts = {name: np.zeros(leaf.shape, np.int32) for name, leaf in named_leaves(abstract_params(model)).items()}
    for piece in table:
        counts[piece.leaf][piece.index] += 1
    assert all((count == 1).all() for count in counts.values())
    assert len({piece.name for piece in table}) == len(table)


@pytest.mark.parametrize("model, table", list(tables()))
def test_a_piece_and_its_inverse(model, table):
    rng = np.random.default_rng(0)
    for piece in table:
        tensor = rng.normal(size=piece.shape)
        region = piece.to_region(tensor)
        np.testing.assert_array_equal(piece.to_tensor(region), tensor)


@pytest.mark.parametrize("kind", CONFIGS)
def test_config_there_and_back(kind):
    model = hf_config.import_config(hf_settings(kind))
    back = hf_config.import_config(hf_config.export_config(model, kind, dtype="float32"))
    assert hf_config.same_architecture(model, back)


@pytest.mark.parametrize("kind", CONFIGS)
def test_accounting_counts_every_weight(kind):
    model = hf_config.import_config(hf_settings(kind))
    assert parameter_counts(model).total == sum(
        math.prod(leaf.shape) for leaf in jax.tree.leaves(abstract_params(model))
    )


def test_shards_on_a_mesh_hold_the_same_weights(tmp_path: Path):
    settings = hf_settings("olmo3moe")
    folder = HFFolder(write_hf(tmp_path / "hf", settings, hf_tensors(settings), shards=3))
    whole = folder.import_params()
    program = InferenceProgram(Config(model=folder.model), make_mesh(parse_mesh("dp=2,ep=4")))
    sharded = folder.import_params(program.target())
    jax.tree.map(np.testing.assert_array_equal, whole, sharded)
    experts = sharded["moe_blocks"]["moe"]["experts"]["w_down"]
    assert {shard.data.shape[1] for shard in experts.addressable_shards} == {1}


def test_bfloat16_with_exceptions_comes_back_in_shards(tmp_path: Path):
    settings = hf_settings("mixtral", dtype="bfloat16")
    tensors = hf_tensors(settings, ml_dtypes.bfloat16)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.float32) * 1.001
    write_hf(tmp_path / "hf", settings, tensors, shards=2)
    assert convert.main(["hf", str(tmp_path / "hf"), str(tmp_path / "run")]) == 0
    assert SavedModel(tmp_path / "run").config.precision.params == "bfloat16"
    assert convert.main(["to-hf", str(tmp_path / "run"), str(tmp_path / "out"), "--shard-gb", "0.000005"]) == 0
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    out = {}
    for name in set(index["weight_map"].values()):
        shard = load_file(tmp_path / "out" / name)
        assert len(shard) == 1 or sum(tensor.nbytes for tensor in shard.values()) <= 5000
        out |= shard
    assert out.keys() == tensors.keys() and len(set(index["weight_map"].values())) > 1
    for name, tensor in tensors.items():
        assert out[name].dtype == tensor.dtype and out[name].tobytes() == tensor.tobytes(), name


def test_a_model_without_origin_takes_the_architecture_that_fits(tmp_path: Path):
    settings = hf_settings("qwen2_moe")
    write_hf(tmp_path / "hf", settings, hf_tensors(settings))
    convert.main(["hf", str(tmp_path / "hf"), str(tmp_path / "run")])
    for file in (tmp_path / "run" / "origin").iterdir():
        file.unlink()
    convert.main(["to-hf", str(tmp_path / "run"), str(tmp_path / "out")])
    assert HFFolder(tmp_path / "out").kind == "qwen2_moe"
    with pytest.raises(UserError, match="mixtral cannot express .*model.attention.qkv_bias=true"):
        convert.main(["to-hf", str(tmp_path / "run"), str(tmp_path / "no"), "--architecture", "mixtral"])


REFUSED = {
    "model_type": ("llama", "model type 'llama' cannot be imported"),
    "clip_qkv": (8.0, "clip_qkv=8.0"),
    "attention_bias": (True, "attention_bias=True"),
    "hidden_act": ("gelu", "hidden_act='gelu'"),
    "rope_scaling": ({"rope_type": "yarn", "factor": 4.0}, "rope_scaling=.*yarn"),
    "quantization_config": ({"bits": 4}, "quantization_config"),
    "num_experts": (None, "lacks num_experts"),
}


@pytest.mark.parametrize("option", REFUSED)
def test_options_without_counterpart_are_refused_by_name(option):
    value, message = REFUSED[option]
    with pytest.raises(UserError, match=message):
        hf_config.import_config(hf_settings("olmoe") | {option: value})


def test_dense_layers_behind_experts_are_refused():
    with pytest.raises(UserError, match=r"mlp_only_layers=\[1\]"):
        hf_config.import_config(hf_settings("qwen3_moe", mlp_only_layers=[1]))


def _without(tensors, folder):
    tensors.pop("model.norm.weight")


def _stranger(tensors, folder):
    tensors["model.layers.0.adapter"] = np.zeros(3, np.float32)


def _misshapen(tensors, folder):
    tensors["model.norm.weight"] = np.zeros(17, np.float32)


def _integers(tensors, folder):
    tensors["model.norm.weight"] = np.zeros(16, np.int8)


@pytest.mark.parametrize(
    "change, message",
    [
        (_without, "no tensor model.norm.weight"),
        (_stranger, "no place for, such as model.layers.0.adapter"),
        (_misshapen, r"model.norm.weight has shape \[17\]"),
        (_integers, "stored as I8"),
    ],
)
def test_every_tensor_is_accounted_for(tmp_path: Path, change, message):
    settings = hf_settings("olmoe")
    tensors = hf_tensors(settings)
    change(tensors, tmp_path)
    write_hf(tmp_path / "hf", settings, tensors)
    with pytest.raises(UserError, match=message):
        convert.main(["hf", str(tmp_path / "hf"), str(tmp_path / "run")])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]


def test_damaged_folders(tmp_path: Path):
    settings = hf_settings("olmoe")
    folder = write_hf(tmp_path / "hf", settings, hf_tensors(settings), shards=2)
    shard = folder / "model-00002-of-00002.safetensors"
    data = shard.read_bytes()
    shard.write_bytes(data[:-5])
    with pytest.raises(UserError, match="is cut short"):
        HFFolder(folder)
    shard.write_bytes(data[:40])
    with pytest.raises(UserError, match="is no safetensors file"):
        HFFolder(folder)
    shard.unlink()
    with pytest.raises(UserError, match="lacks model-00002-of-00002.safetensors"):
        HFFolder(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(UserError, match="not valid JSON"):
        HFFolder(folder)
    with pytest.raises(UserError, match="has no config.json"):
        HFFolder(tmp_path)


def test_nothing_is_left_of_what_fails_on_the_way(tmp_path: Path, monkeypatch):
    settings = hf_settings("olmoe")
    folder = write_hf(tmp_path / "hf", settings, hf_tensors(settings))
    full = tmp_path / "full"
    full.mkdir()
    (full / "file").write_text("mine")
    with pytest.raises(UserError, match="exists and is not empty"):
        convert.main(["hf", str(folder), str(full)])
    ids = np.zeros((1, 4), np.int32)
    np.savez(tmp_path / "ids.npz", ids=ids, logits=np.zeros((1, 4, 48), np.float32))
    with pytest.raises(UserError, match="logits differ"):
        convert.main(["hf", str(folder), str(tmp_path / "run"), "--verify", str(tmp_path / "ids.npz")])

    def no_space(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(mapping, "_place", no_space)
    with pytest.raises(UserError, match="no space left on device"):
        convert.main(["hf", str(folder), str(tmp_path / "run")])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full", "hf", "ids.npz"]
    assert (full / "file").read_text() == "mine"


def test_a_tokenizer_of_another_vocabulary_is_refused(tmp_path: Path):
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {f"t{n}": n for n in range(60)} | {"<|endoftext|>": 60}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="t0"))
    settings = hf_settings("olmoe")
    folder = write_hf(tmp_path / "hf", settings, hf_tensors(settings))
    tokenizer.save(str(folder / "tokenizer.json"))
    with pytest.raises(UserError, match="tokenizer of another model"):
        convert.main(["hf", str(folder), str(tmp_path / "run")])
    assert not (tmp_path / "run").exists()


def test_fixture_files_are_what_the_package_writes(tmp_path: Path):
    """Our reader against the package `safetensors`, on dtypes of every width."""
    from moejax.checkpoint.safetensors_file import SafetensorsFile, write

    rng = np.random.default_rng(0)
    kinds = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
    arrays = {kind: rng.normal(size=(3, 5)).astype(dtype) for kind, dtype in kinds.items()}
    save_file(arrays, tmp_path / "theirs.safetensors")
    file = SafetensorsFile(tmp_path / "theirs.safetensors")
    write(tmp_path / "ours.safetensors", {k: (k, a.shape) for k, a in arrays.items()}, file.read)
    ours = load_file(tmp_path / "ours.safetensors")
    for kind, array in arrays.items():
        assert ours[kind].dtype == array.dtype and ours[kind].tobytes() == array.tobytes()
