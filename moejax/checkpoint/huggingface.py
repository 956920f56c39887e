"""Hugging Face folders: safetensors, single or sharded, with `config.json`; read tensor by tensor, and written.

    folder --open--> HFFolder: model, tensors --import_params--> params on any sharding
    params + config + the files beside it --export_folder--> a folder that transformers loads

Six architectures (`hf_config.CLASSES`). Export of what was imported gives every tensor back bit for bit.
"""

import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from moejax.checkpoint import hf_config, hf_names, mapping, safetensors_file
from moejax.checkpoint.arrays import named_leaves
from moejax.checkpoint.mapping import Piece
from moejax.checkpoint.safetensors_file import DTYPES, SafetensorsFile, TensorInfo
from moejax.config import ModelConfig
from moejax.errors import UserError
from moejax.models.transformer import Params, abstract_params

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
BESIDE = (
    "generation_config.json tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json vocab.json "
    "merges.txt tokenizer.model chat_template.jinja chat_template.json"
).split()
"""Files that belong to a model and go along with it unread."""
FLOATS = ("F32", "F16", "BF16")
SPELLED = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class HFFolder:
    """A folder as transformers saves it. config: `config.json`; kind: its `model_type`; model; tensors: by name.

    Only headers are read. Raises UserError: a file missing or damaged, another architecture, an option that moejax
    cannot express, a tensor that is missing, left over or of another shape.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.config = read_json(self.path / CONFIG)
        self.kind = hf_config.architecture_of(self.config)
        self.model: ModelConfig = hf_config.import_config(self.config)
        self._files = _open_files(self.path)
        self.tensors: dict[str, TensorInfo] = {
            name: file.tensors[name] for name, file in self._files.items() if not name.endswith(hf_names.COMPUTED)
        }
        self.pieces: list[Piece] = hf_names.pieces(self.kind, self.model)
        mapping.check_tensors(self.pieces, {n: t.shape for n, t in self.tensors.items()}, str(self.path))
        for name, tensor in self.tensors.items():
            if tensor.dtype not in FLOATS:
                raise UserError(
                    f"{self.path}: tensor {name} is stored as {tensor.dtype}; weights in {', '.join(FLOATS)} can be "
                    f"imported."
                )

    @property
    def dtypes(self) -> dict[str, str]:
        """Dtype of every tensor, as safetensors spells it."""
        return {name: tensor.dtype for name, tensor in self.tensors.items()}

    @property
    def main_dtype(self) -> str:
        """The dtype of most weights."""
        sizes: dict[str, int] = {}
        for tensor in self.tensors.values():
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + math.prod(tensor.shape)
        return max(sizes, key=lambda dtype: sizes[dtype])

    def read(self, name: str) -> np.ndarray:
        return self._files[name].read(name)

    def import_params(self, target: Params | None = None) -> Params:
        """fp32 weights in model order on the shardings of `target` (None: the first device), one tensor at a time."""
        return mapping.assemble(abstract_params(self.model) if target is None else target, self.pieces, self.read)

    def beside(self) -> list[Path]:
        """The files that go along: tokenizer, generation settings."""
        return [self.path / name for name in BESIDE if (self.path / name).is_file()]


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of a model's folder; raises UserError."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise UserError(f"{path.parent} has no {path.name}; name the folder of a Hugging Face model.") from None
    except NotADirectoryError:
        raise UserError(f"{path.parent} is no folder; name the folder of a Hugging Face model.") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({(error.strerror or str(error)).lower()}).") from error
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON ({error}).") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} must hold a JSON object.")
    return value


def _open_files(path: Path) -> dict[str, SafetensorsFile]:
    """The file of every tensor, by name."""
    if (path / SINGLE).is_file():
        file = SafetensorsFile(path / SINGLE)
        return dict.fromkeys(file.tensors, file)
    if not (path / INDEX).is_file():
        there = sorted(p.name for p in path.glob("*.bin"))
        other = f"; {there[0]} is a pickle, which is not read: save it as safetensors" if there else ""
        raise UserError(f"{path} has neither {SINGLE} nor {INDEX}{other}.")
    places = read_json(path / INDEX).get("weight_map")
    if not isinstance(places, dict):
        raise UserError(f"{path / INDEX} has no weight_map.")
    opened: dict[str, SafetensorsFile] = {}
    files: dict[str, SafetensorsFile] = {}
    for name, shard in places.items():
        if Path(shard).name != shard:
            raise UserError(f"{path / INDEX} names the file {shard!r}, which is not in the folder itself.")
        if shard not in opened:
            if not (path / shard).is_file():
                raise UserError(f"{path} lacks {shard}, which {INDEX} names; fetch the missing file.")
            opened[shard] = SafetensorsFile(path / shard)
        if name not in opened[shard].tensors:
            raise UserError(f"{path / shard} has no tensor {name}, which {INDEX} places there.")
        files[name] = opened[shard]
    return files


def export_folder(
    folder: Path,
    config: hf_config.HFConfig,
    params: Params,
    *,
    model: ModelConfig,
    dtype: str,
    dtypes: Mapping[str, str] | None = None,
    beside: list[Path] | None = None,
    shard_bytes: int = 5_000_000_000,
    card: str = "",
) -> list[Piece]:
    """Write `params` (fp32, model order) as a folder of the architecture of `config`; returns what went where.

    dtype: of the tensors, BF16, F16 or F32; dtypes: of single ones. config: a `config.json` that describes `model`.
    beside: files copied along. card: README.md. The folder must exist; raises OSError where it cannot be written.
    """
    table = hf_names.pieces(hf_config.architecture_of(config), model)
    spelled = {piece.name: (dtypes or {}).get(piece.name, dtype) for piece in table}
    shards: list[list[Piece]] = [[]]
    filled = 0
    for piece in table:
        size = math.prod(piece.shape) * DTYPES[spelled[piece.name]].itemsize
        if filled and filled + size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(piece)
        filled += size
    leaves, by_name = named_leaves(params), {piece.name: piece for piece in table}
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {piece.name: (spelled[piece.name], piece.shape) for piece in shard}
        safetensors_file.write(folder / name, tensors, lambda tensor: mapping.take(leaves, by_name[tensor]))
        places |= dict.fromkeys(tensors, name)
    if len(shards) > 1:
        total = sum(math.prod(piece.shape) * DTYPES[spelled[piece.name]].itemsize for piece in table)
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    (folder / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    for file in beside or []:
        shutil.copyfile(file, folder / file.name)
    if card:
        (folder / "README.md").write_text(card)
    return table
