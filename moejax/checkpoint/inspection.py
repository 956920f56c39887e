"""What lies in a folder, said in a few lines and one table: run folders, Hugging Face folders, Olmo-core
checkpoints."""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table

from moejax import config_io
from moejax.accounting import parameter_counts
from moejax.checkpoint.conversion import Report
from moejax.checkpoint.distcp import METADATA
from moejax.checkpoint.huggingface import HFFolder
from moejax.checkpoint.olmo_core_folder import OlmoCoreFolder
from moejax.checkpoint.saved_model import CHECKPOINTS, SavedModel
from moejax.config import Config, ModelConfig
from moejax.errors import UserError


def _console() -> Console:
    """Wide enough that no name is cut where the output is no terminal."""
    console = Console(highlight=False, soft_wrap=False)
    return console if console.is_terminal else Console(highlight=False, width=200)


def show_report(report: Report) -> None:
    """What went where, then the sentences of the check."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title, side in (
        ("theirs", "left"),
        ("tensors", "right"),
        ("dtype", "left"),
        ("ours", "left"),
        ("shape", "left"),
    ):
        table.add_column(title, justify=side, overflow="fold")  # type: ignore[arg-type]
    for theirs, count, dtype, ours, shape in report.rows:
        table.add_row(theirs.replace("[", "\\["), f"{count:,}", dtype, ours, shape.replace("[", "\\["))
    console = _console()
    console.print(table)
    for note in report.notes:
        console.print(note, soft_wrap=True, markup=False)


def show(path: Path, step: int | None = None) -> None:
    """Step, settings, sizes and the shape of every tensor. Raises UserError for what is none of the three."""
    if not path.is_dir():
        raise UserError(f"{path} is no folder; name a run folder, a Hugging Face folder or an Olmo-core checkpoint.")
    console = _console()
    if (path / CHECKPOINTS).is_dir():
        saved = SavedModel(path, step)
        console.print(
            f"Run folder {path}, step {saved.step} of {', '.join(map(str, saved.checkpoints.steps()))}.", soft_wrap=True
        )
        origin = saved.origin
        if origin:
            console.print(f"Imported from {origin['format']} {origin.get('model_type', '')}".rstrip() + ".")
        console.print(f"Saved by moejax {saved.record.get('moejax')} on mesh {saved.record.get('mesh')}.")
        _model(console, saved.config.model)
        manifest = saved.manifest
        console.print(f"{sum(file.bytes for file in manifest.files.values()):,} bytes in {len(manifest.files)} files.")
        different = config_io.differences(config_io.to_dict(Config()), config_io.to_dict(saved.config))
        console.print("Settings that are not the default:\n  " + "\n  ".join(different), markup=False, soft_wrap=True)
        _tensors(console, {name: (tensor.dtype, tensor.shape) for name, tensor in manifest.tensors.items()})
    elif any((folder / METADATA).is_file() for folder in (path, path / "model_and_optim")):
        theirs = OlmoCoreFolder(path)
        console.print(
            f"Olmo-core 3 checkpoint {path}, step {theirs.step}, with {', '.join(theirs.roles)}.", soft_wrap=True
        )
        _model(console, theirs.model)
        _tensors(console, {piece.name: ("float32", piece.shape) for piece in theirs.pieces})
    elif (path / "config.json").is_file():
        folder = HFFolder(path)
        console.print(f"Hugging Face folder {path}: {folder.kind}, most of it in {folder.main_dtype}.", soft_wrap=True)
        _model(console, folder.model)
        _tensors(console, {piece.name: (folder.tensors[piece.name].dtype, piece.shape) for piece in folder.pieces})
    else:
        raise UserError(
            f"{path} is neither a run folder ({CHECKPOINTS}/), nor a Hugging Face folder (config.json), nor an "
            f"Olmo-core "
            f"checkpoint ({METADATA})."
        )


def _model(console: Console, model: ModelConfig) -> None:
    counts = parameter_counts(model)
    console.print(
        f"{counts.total:,} parameters, {counts.active:,} active per token: {model.n_layers} layers of width "
        f"{model.d_model}, "
        f"{model.moe.num_experts} experts, {model.moe.top_k} per token, vocabulary {model.vocab_size:,}.",
        soft_wrap=True,
    )


def _tensors(console: Console, tensors: Mapping[str, tuple[str, Iterable[int]]]) -> None:
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("tensor", overflow="fold")
    table.add_column("dtype")
    table.add_column("shape")
    table.add_column("numbers", justify="right")
    for name, (dtype, shape) in tensors.items():
        sizes = list(shape)
        table.add_row(name, dtype, str(sizes).replace("[", "\\["), f"{math.prod(sizes):,}")
    console.print(table)
