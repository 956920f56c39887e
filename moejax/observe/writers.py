"""Where the metrics of a run go: any of metrics.jsonl, TensorBoard event files, Weights & Biases.

    step, {"loss": 2.5, "load": [3, 1, ...]} --Writers--> plain numbers, once --> every writer that run.writers names

What a writer needs is imported when it is asked for; an extra that is not installed is one sentence.
"""

import contextlib
import importlib
import os
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol, Self

from moejax.errors import UserError
from moejax.observe.append_file import write_error
from moejax.observe.event_file import EventFileWriter, finite_values
from moejax.observe.jsonl import JsonlWriter

_ID_FILE = "wandb_id.txt"


class Writer(Protocol):
    def write(self, step: int, metrics: Mapping[str, Any]) -> None: ...
    def close(self) -> None: ...


class Writers:
    """The open writers of a run; also a context manager. Made by `open_writers`."""

    def __init__(self, writers: Iterable[Writer]):
        self._writers = list(writers)

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Record the metrics of one step in every writer before returning.

        metrics: name -> number, or (nested) list of numbers such as counts per expert; NumPy scalars and arrays will
        do. Integers stay integers. Raises UserError when the disk refuses, TypeError or ValueError for no metric.
        """
        if "step" in metrics:
            raise ValueError('"step" is the key of the step itself; name the metric differently.')
        plain = {key: _plain(key, value) for key, value in metrics.items()}
        for writer in self._writers:
            writer.write(int(step), plain)

    def close(self) -> None:
        """Close every writer, even after one has failed. Safe to call twice."""
        with contextlib.ExitStack() as stack:
            while self._writers:
                stack.callback(self._writers.pop(0).close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_writers(
    kinds: Iterable[str], run_dir: str | Path, config_dict: Mapping[str, Any], resume_step: int | None
) -> Writers:
    """Open the writers named in `kinds` ("jsonl", "tensorboard", "wandb"; repeats count once) in `run_dir`.

    config_dict: the resolved configuration, for those that show it (wandb).
    resume_step: the step of the checkpoint the run goes on from; records of later steps are cut off, since they will be
    written again, and a last line halved by a kill is removed. None starts anew: no earlier record stays. (0 keeps
    records of step 0, such as an evaluation before training.)
    Raises UserError: unknown kind, extra not installed, folder that cannot be written.
    """
    kinds = list(dict.fromkeys(str(kind) for kind in kinds))
    for kind in kinds:
        if kind not in _MAKERS:
            raise UserError(f"run.writers has no '{kind}'; there are: {', '.join(_MAKERS)}.")
    run_dir = Path(run_dir)
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise write_error(run_dir, error) from error
    writers: list[Writer] = []
    try:
        # jsonl last: nothing is cut off while another writer may still turn out to be missing.
        for kind in sorted(kinds, key=lambda kind: kind == "jsonl"):
            writers.append(_MAKERS[kind](run_dir, config_dict, resume_step))
    except BaseException:
        Writers(writers).close()
        raise
    return Writers(reversed(writers))


class WandbWriter:
    """A Weights & Biases run, lists as histograms. Its id is kept in run_dir, so that a resume goes on in the same run.

    Steps that wandb already has are refused there; they come out the same after a resume, so none is lost.
    """

    def __init__(self, run_dir: Path, config_dict: Mapping[str, Any]):
        self._wandb = importlib.import_module("wandb")
        try:
            self._run = self._wandb.init(
                project="moejax",
                name=run_dir.resolve().name,
                id=_wandb_id(run_dir),
                dir=str(run_dir),
                config=dict(config_dict),
                resume="allow",
                settings=self._wandb.Settings(console="off"),  # log.txt has it, and the live display is not for a pipe
            )
        except self._wandb.Error as error:
            raise UserError(
                f"wandb would not start ({' '.join(str(error).split())}); "
                "run `wandb login`, set WANDB_MODE=offline, or leave wandb out of run.writers."
            ) from error

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._run.log(
            {k: self._wandb.Histogram(finite_values(v)) if isinstance(v, list) else v for k, v in metrics.items()},
            step=step,
        )

    def close(self) -> None:
        self._run.finish()


def _wandb_id(run_dir: Path) -> str:
    path = run_dir / _ID_FILE
    try:
        if path.is_file() and (known := path.read_text().strip()):
            return known
        fresh = uuid.uuid4().hex[:12]
        temporary = path.with_suffix(".tmp")
        temporary.write_text(fresh + "\n")
        os.replace(temporary, path)
        return fresh
    except OSError as error:
        raise write_error(path, error) from error


def _tensorboard(run_dir: Path, config_dict: Mapping[str, Any], resume_step: int | None) -> Writer:
    with _extra("tensorboard", "neither tensorboardX nor tensorboard is"):
        return EventFileWriter(run_dir, resume_step)


def _wandb(run_dir: Path, config_dict: Mapping[str, Any], resume_step: int | None) -> Writer:
    with _extra("wandb", "wandb is not"):
        return WandbWriter(run_dir, config_dict)


_MAKERS = {
    "jsonl": lambda run_dir, config_dict, resume_step: JsonlWriter(run_dir, resume_step),
    "tensorboard": _tensorboard,
    "wandb": _wandb,
}


@contextlib.contextmanager
def _extra(name: str, what_is: str):
    try:
        yield
    except ImportError as error:
        raise UserError(
            f"run.writers asks for {name}, but {what_is} installed: pip install moejax[{name}], "
            f"or leave {name} out of run.writers."
        ) from error


def _plain(key: str, value: Any) -> Any:
    """Python ints, floats and lists of them, from those or from anything with NumPy's `item` and `tolist`."""
    if getattr(value, "ndim", 0):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [_plain(key, item) for item in value]
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, int):
        return int(value)
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        raise TypeError(f"The metric {key} is a {type(value).__name__}; metrics are numbers or lists of numbers.")
    return float(value)
