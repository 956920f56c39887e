"""A model from one house to another: import into a run folder, export out of one, each checked by reading it back.

    import_hf(SRC, DST), import_olmo_core(SRC, DST)    read, save, read again, compare every tensor bit for bit, then
    rename export_hf(RUN, DST)                                write, open as any importer would, compare, then rename

DST appears whole and checked, or not at all. Each takes a function from a model to the shapes and shardings of its
weights: tensors go one by one into the shards that hold a part of them, so a model need not fit one device.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moejax.checkpoint import hf_config, mapping
from moejax.checkpoint.arrays import Tensor, named_leaves
from moejax.checkpoint.huggingface import CONFIG, SPELLED, HFFolder, export_folder, read_json
from moejax.checkpoint.mapping import Piece
from moejax.checkpoint.olmo_core_folder import OlmoCoreFolder
from moejax.checkpoint.safetensors_file import DTYPES
from moejax.checkpoint.saved_model import ORIGIN, SavedModel, abstract_state, run_config, whole_or_nothing, write_run
from moejax.config import ModelConfig
from moejax.data.tokenizers import load_tokenizer
from moejax.errors import UserError
from moejax.models.transformer import Params, Transformer, abstract_params

type Target = Callable[[ModelConfig], Params]
TOLERANCE = 2e-5  # of logits, absolute; fp32 against fp32


@dataclass
class Report:
    """What a conversion did. rows: (their tensors, how many, dtype; our weight, its shape). notes: sentences."""

    rows: list[tuple[str, int, str, str, str]]
    notes: list[str]


def import_hf(src: Path, dst: Path, verify: Path | None = None, target: Target = abstract_params) -> Report:
    """A Hugging Face folder into the run folder `dst`: weights only, step 0. verify: an .npz with ids and logits."""
    folder = HFFolder(src)
    beside = [src / CONFIG, *folder.beside()]
    notes = []
    tokenizer = "bytes"
    if (src / "tokenizer.json").is_file():
        _check_tokenizer(src / "tokenizer.json", folder.model)
        tokenizer = str(dst / ORIGIN / "tokenizer.json")
    else:
        notes.append("No tokenizer.json came with it: give data.tokenizer a path to train on or to generate text.")
    dtype = "float32" if folder.main_dtype == "F32" else "bfloat16"
    length = folder.config.get("max_position_embeddings") or 2048
    config = run_config(folder.model, dst, dtype=dtype, sequence_length=length, tokenizer=tokenizer)
    origin: dict[str, Any] = {"format": "hf", "model_type": folder.kind, "dtype": folder.main_dtype}
    origin["dtypes"] = {name: dtype for name, dtype in folder.dtypes.items() if dtype != folder.main_dtype}
    with whole_or_nothing(dst) as partial:
        state = {"step": jnp.zeros((), jnp.int32), "master": folder.import_params(target(folder.model))}
        if verify:
            notes.append(_verify(folder.model, state["master"], verify))
        checkpoints = write_run(partial, config, state, origin, beside)
        del state
        state, _ = checkpoints.restore(abstract_state(target(folder.model), ["master"]))
        _compare(folder.pieces, named_leaves(state["master"]), folder.read, str(src))
        checkpoints.close()
    notes.append(f"Read back: all {len(folder.pieces)} tensors are in {dst} bit for bit.")
    return Report(_rows(folder.pieces, folder.dtypes, folder.model), notes)


def import_olmo_core(src: Path, dst: Path, verify: Path | None = None, target: Target = abstract_params) -> Report:
    """An Olmo-core 3 checkpoint into the run folder `dst`, with its step, and its moments where it has them."""
    folder = OlmoCoreFolder(src)
    config = run_config(folder.model, dst, dtype="bfloat16", sequence_length=2048, tokenizer="bytes")
    origin = {"format": "olmo-core", "settings": folder.settings}
    notes = ["The tokenizer is not part of the checkpoint: give data.tokenizer the path of its tokenizer.json."]
    with whole_or_nothing(dst) as partial:
        state = folder.import_state({role: target(folder.model) for role in folder.roles})
        if verify:
            notes.append(_verify(folder.model, state["master"], verify, folder.score_bias))
        checkpoints = write_run(partial, config, state, origin)
        del state
        state, _ = checkpoints.restore(abstract_state(target(folder.model), folder.roles), subset=True)
        for role in folder.roles:
            leaves = named_leaves(state[role])
            _compare(folder.pieces, leaves, lambda name, role=role: folder.read(role, name), str(src))
        checkpoints.close()
    moments = "with both moments" if "first_moment" in folder.roles else "without moments: they start at zero"
    notes.append(
        f"Read back: all {len(folder.pieces)} tensors of {' and '.join(folder.roles)} are in {dst} bit for bit; "
        f"step {folder.step}, {moments}."
    )
    return Report(_rows(folder.pieces, {}, folder.model), notes)


def export_hf(
    run: Path,
    dst: Path,
    *,
    kind: str | None = None,
    dtype: str | None = None,
    step: int | None = None,
    shard_gb: float = 5.0,
    verify: Path | None = None,
    target: Target = abstract_params,
) -> Report:
    """A checkpoint of a run folder as a Hugging Face folder.

    kind: `model_type`; None takes the one the model came with, else the first that can express it. dtype: F32, F16 or
    BF16; None takes the one each tensor came with, else `precision.params`. Raises UserError naming what cannot be
    said.
    """
    saved = SavedModel(run, step)
    model, origin = saved.config.model, saved.origin or {}
    spelled = {name: hf for hf, name in SPELLED.items()}
    given = dtype or origin.get("dtype") or spelled[saved.config.precision.params.value]
    source = saved.path / ORIGIN / CONFIG
    known = read_json(source) if origin.get("format") == "hf" and source.is_file() else None
    if known is not None and kind in (None, known["model_type"]):
        if not hf_config.same_architecture(hf_config.import_config(known), model):
            known = None
    else:
        known = None
    config = known or hf_config.export_config(
        model,
        kind,
        dtype=SPELLED[given],
        sequence_length=saved.config.data.sequence_length,
        end_of_document_id=_end_of_document(saved.config.data.tokenizer),
    )
    dtypes = origin.get("dtypes", {}) if known and dtype is None else {}
    if known and dtype is not None:
        config = {**known, ("torch_dtype" if "torch_dtype" in known else "dtype"): SPELLED[given]}
    notes = []
    with whole_or_nothing(dst) as partial:
        params = saved.params(target(model))
        if verify:
            notes.append(_verify(model, params, verify))
        table = export_folder(
            partial,
            config,
            params,
            model=model,
            dtype=given,
            dtypes=dtypes,
            beside=_beside(saved),
            shard_bytes=max(1, int(shard_gb * 1e9)),
            card=_card(saved, config),
        )
        back = HFFolder(partial)
        if not hf_config.same_architecture(back.model, model):
            raise AssertionError("the exported config describes another model")  # a fault of ours
        leaves = named_leaves(params)
        for piece in table:
            wanted = mapping.take(leaves, piece).astype(DTYPES[back.dtypes[piece.name]])
            if not _same_bits(back.read(piece.name), wanted):
                raise UserError(
                    f"{dst}: tensor {piece.name} did not come back as it was written; the disk may be faulty."
                )
    notes.append(f"Read back: all {len(table)} tensors are in {dst} bit for bit, as {config['model_type']} in {given}.")
    return Report(_rows(table, back.dtypes, model), notes)


def _end_of_document(tokenizer: str) -> int | None:
    """The id that ends a text, where there is a tokenizer that transformers can load too."""
    try:
        return None if tokenizer == "bytes" else load_tokenizer(tokenizer).end_of_document_id
    except UserError:  # the file is not here any more: the weights are none the worse for it
        return None


def _beside(saved: SavedModel) -> list[Path]:
    """Tokenizer and generation settings, those of the origin or the tokenizer the run was trained with."""
    files = [file for file in saved.origin_files() if file.name != CONFIG]
    tokenizer = Path(saved.config.data.tokenizer).expanduser()
    tokenizer = tokenizer / "tokenizer.json" if tokenizer.is_dir() else tokenizer
    if (
        not any(file.name == "tokenizer.json" for file in files)
        and tokenizer.name == "tokenizer.json"
        and tokenizer.is_file()
    ):
        files.append(tokenizer)
    return files


def _card(saved: SavedModel, config: Mapping[str, Any]) -> str:
    """A model card to be completed by who publishes the model."""
    moe = saved.config.model.moe
    return (
        f"---\nlibrary_name: transformers\npipeline_tag: text-generation\n---\n\n# {saved.config.run.name}\n\n"
        f"A mixture-of-experts language model of the architecture `{config['model_type']}`: "
        f"{saved.config.model.n_layers} "
        f"layers of width {saved.config.model.d_model}, {moe.num_experts} experts a layer, {moe.top_k} a token.\n"
        f"Trained with moejax, step {saved.step}.\n\n"
        "What it was trained on, for which use, and under which licence: to be said by who publishes it.\n"
    )


def _check_tokenizer(path: Path, model: ModelConfig) -> None:
    """Raises UserError where the tokenizer has more tokens than the model has rows, or is none."""
    tokenizer = load_tokenizer(str(path))
    if tokenizer.vocab_size > model.vocab_size:
        raise UserError(
            f"{path} is the tokenizer of another model: it has ids up to {tokenizer.vocab_size - 1}, and the model has "
            f"{model.vocab_size} rows; bring the one that belongs to it."
        )


def _same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    # By integers, as NaN differs from itself; row by row, so that a model's largest tensor is not copied for it.
    bits = np.dtype(f"u{a.dtype.itemsize}")
    rows = zip(np.atleast_2d(a), np.atleast_2d(b), strict=True)
    return all(np.array_equal(np.ascontiguousarray(x).view(bits), np.ascontiguousarray(y).view(bits)) for x, y in rows)


def _compare(table: list[Piece], leaves: Mapping[str, Any], read: Callable[[str], np.ndarray], src: str) -> None:
    """Every tensor of the source against what was restored."""
    for piece in table:
        source = read(piece.name).reshape(piece.shape).astype(np.float32, copy=False)
        if not _same_bits(mapping.take(leaves, piece), source):
            raise UserError(f"Tensor {piece.name} of {src} did not come back as it was read; the disk may be faulty.")


def _verify(model: ModelConfig, params: Params, file: Path, score_bias: np.ndarray | None = None) -> str:
    """Logits against given ones; the sentence that says how near they are, or UserError."""
    try:
        with np.load(file) as arrays:
            ids, expected = np.asarray(arrays["ids"], np.int32), np.asarray(arrays["logits"], np.float32)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"{file} cannot be used: it must be an .npz with arrays `ids` [B, S] and `logits` [B, S, V]."
        ) from error
    if expected.shape != (*ids.shape, model.vocab_size) or ids.min() < 0 or ids.max() >= model.vocab_size:
        raise UserError(
            f"{file} belongs to another model: logits of shape {list(expected.shape)} for ids of shape "
            f"{list(ids.shape)}, "
            f"and this model has a vocabulary of {model.vocab_size}."
        )
    logits = np.asarray(jax.jit(Transformer(model, params, score_bias=score_bias).__call__)(ids))
    error = float(np.max(np.abs(logits - expected)))
    if not error <= TOLERANCE:
        raise UserError(
            f"The logits differ from those in {file} by up to {error:.2e}, more than {TOLERANCE:.0e}; nothing is "
            f"written."
        )
    return f"Verified: logits of {ids.size} tokens differ from {file} by at most {error:.1e}."


def _rows(table: list[Piece], dtypes: Mapping[str, str], model: ModelConfig) -> list[tuple[str, int, str, str, str]]:
    """The table by patterns: every number in a name becomes a star."""
    shapes = {name: Tensor(tuple(leaf.shape), "float32") for name, leaf in named_leaves(abstract_params(model)).items()}
    groups: dict[tuple[str, str, str], list[Piece]] = {}
    for piece in table:
        pattern = re.sub(r"\.\d+\.", ".*.", piece.name)
        groups.setdefault((pattern, dtypes.get(piece.name, "F32"), piece.leaf), []).append(piece)
    rows = []
    for (pattern, dtype, leaf), group in groups.items():
        rows.append((f"{pattern} {list(group[0].shape)}", len(group), dtype, leaf, str(list(shapes[leaf].shape))))
    return rows
