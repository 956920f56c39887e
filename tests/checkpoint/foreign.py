"""Small foreign checkpoints made on the spot: a Hugging Face folder of any architecture, a distributed checkpoint of
torch."""

import io
import json
import pickle
import sys
import types
import zipfile
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from moejax.checkpoint import hf_config, hf_names

SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "rms_norm_eps": 1e-6,
    "vocab_size": 48,
    "tie_word_embeddings": False,
}
CONFIGS = {
    "olmoe": {"num_experts": 4, "intermediate_size": 8},
    "flex_olmo": {"num_experts": 4, "intermediate_size": 8},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 8, "intermediate_size": 24, "head_dim": 8},
    "qwen2_moe": {
        "num_experts": 4,
        "moe_intermediate_size": 8,
        "shared_expert_intermediate_size": 12,
        "intermediate_size": 24,
        "mlp_only_layers": [0],
    },
    "mixtral": {"num_local_experts": 4, "intermediate_size": 8},
    "olmo3moe": {
        "n_routed_experts": 4,
        "moe_intermediate_size": 8,
        "shared_expert_intermediate_size": 8,
        "dense_mlp_intermediate_size": 24,
        "attention_hidden_size": 16,
        "layer_types": ["full_attention"] * 2,
        "embed_norm": True,
        "embed_scale": 4.0,
        "use_peri_ln": True,
        "use_head_qk_norm": True,
    },
}


def hf_settings(kind: str, **changes) -> dict:
    return {"model_type": kind, **SIZES, **CONFIGS[kind], **changes}


def hf_tensors(settings: dict, dtype=np.float32) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    table = hf_names.pieces(settings["model_type"], hf_config.import_config(settings))
    return {piece.name: rng.normal(0, 0.2, piece.shape).astype(dtype) for piece in table}


def write_hf(folder: Path, settings: dict, tensors: dict[str, np.ndarray], shards: int = 1) -> Path:
    """As transformers writes it: one file, or several with an index."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(settings))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    places = {}
    for shard in range(shards):
        name = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = dict(list(tensors.items())[shard::shards])
        save_file(part, folder / name, metadata={"format": "pt"})
        places |= dict.fromkeys(part, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


# --- torch's side, without torch: classes of its names, pickled ------------------------------------------------------


class _Torch:
    """While entered, modules of torch's names exist that hold plain classes, so that pickle writes their names."""

    MODULES = ("torch", "torch._utils", "torch.serialization")
    NAMES = {
        "torch.distributed.checkpoint.metadata": (
            "Metadata TensorStorageMetadata TensorProperties ChunkStorageMetadata MetadataIndex BytesStorageMetadata"
        ).split(),
        "torch.distributed.checkpoint.filesystem": ["_StorageInfo"],
    }

    def __enter__(self):
        self.kept = {name: sys.modules.get(name) for name in (*self.MODULES, *self.NAMES)}
        self.classes = types.SimpleNamespace()
        for module in self.kept:
            sys.modules[module] = types.ModuleType(module)
        for module, names in self.NAMES.items():
            for name in names:
                made = type(name, (), {"__module__": module})
                setattr(sys.modules[module], name, made)
                setattr(self.classes, name, made)
        self.classes.TensorProperties.__getstate__ = _properties
        size = type("Size", (tuple,), {"__module__": "torch", "__reduce__": lambda self: (type(self), (tuple(self),))})
        self.classes.Size = sys.modules["torch"].Size = size
        for kind in ("FloatStorage", "LongStorage"):
            setattr(sys.modules["torch"], kind, type(kind, (), {"__module__": "torch"}))
        sys.modules["torch"].float32 = _Name("torch", "float32")
        sys.modules["torch.serialization"]._get_layout = _function("torch.serialization", "_get_layout")
        sys.modules["torch._utils"]._rebuild_tensor_v2 = _function("torch._utils", "_rebuild_tensor_v2")
        return self

    def __exit__(self, *_):
        for name, module in self.kept.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


class _Name:
    """Pickled as a global of that name, as torch does with dtypes."""

    def __init__(self, module: str, name: str):
        self.__module__, self.name = module, name

    def __reduce__(self):
        return self.name


def _properties(_) -> tuple:
    """The state of torch's TensorProperties for an fp32 tensor."""
    layout = _Call(sys.modules["torch.serialization"]._get_layout, "torch.strided")
    return (sys.modules["torch"].float32, layout, False, None, False)


def _function(module: str, name: str):
    def made(*_):
        raise AssertionError("not to be called")

    made.__module__, made.__name__, made.__qualname__ = module, name, name
    return made


def _with(made, **state):
    made.__dict__.update(state)
    return made


class _TensorPickler(pickle.Pickler):
    def persistent_id(self, value):
        return value[1] if isinstance(value, tuple) and value[:1] == ("persistent",) else None


class _Call:
    def __init__(self, function, *arguments):
        self.what = (function, arguments)

    def __reduce__(self):
        return self.what


def _saved_tensor(array: np.ndarray) -> bytes:
    """What torch.save writes for a contiguous fp32 tensor."""
    storage = ("persistent", ("storage", sys.modules["torch"].FloatStorage, "0", "cpu", array.size))
    strides = tuple(s // array.itemsize for s in array.strides)
    out, archive = io.BytesIO(), io.BytesIO()
    rebuild = sys.modules["torch._utils"]._rebuild_tensor_v2
    _TensorPickler(out, 2).dump(_Call(rebuild, storage, 0, array.shape, strides, False, {}))
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("archive/data.pkl", out.getvalue())
        file.writestr("archive/byteorder", "little")
        file.writestr("archive/data/0", array.tobytes())
    return archive.getvalue()


def write_distcp(folder: Path, tensors: dict[str, np.ndarray], files: int = 1, chunks: int = 1) -> Path:
    """A distributed checkpoint of fp32 tensors, each cut along its first axis into `chunks`, over `files` shard
    files."""
    folder.mkdir(parents=True)
    shards = [bytearray() for _ in range(files)]
    with _Torch() as torch:
        c = torch.classes
        entries, places, turn = {}, {}, 0
        for name, array in tensors.items():
            parts = np.array_split(array, chunks) if array.ndim and chunks > 1 else [array]
            made, start = [], 0
            for part in parts:
                offsets = (start, *[0] * (array.ndim - 1)) if array.ndim else ()
                start += len(part) if array.ndim else 0
                made.append(_with(c.ChunkStorageMetadata(), offsets=c.Size(offsets), sizes=c.Size(part.shape)))
                data = _saved_tensor(part.copy())
                shard, turn = turn % files, turn + 1
                index = _with(c.MetadataIndex(), fqn=name, offset=c.Size(offsets), index=len(made) - 1)
                place = dict(relative_path=f"__{shard}_0.distcp", offset=len(shards[shard]), length=len(data))
                places[index] = _with(c._StorageInfo(), **place, transform_descriptors=None)
                shards[shard] += data
            properties = c.TensorProperties()
            entry = _with(c.TensorStorageMetadata(), properties=properties, size=c.Size(array.shape), chunks=made)
            entries[name] = entry
        top = _with(c.Metadata(), state_dict_metadata=entries, planner_data=None, storage_data=places, version="1.0.0")
        (folder / ".metadata").write_bytes(pickle.dumps(top, 4))
    for shard, data in enumerate(shards):
        (folder / f"__{shard}_0.distcp").write_bytes(bytes(data))
    return folder
