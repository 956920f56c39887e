"""metrics.jsonl: one JSON object a line, one line a step, whole again after any kill.

    {"loss": 2.5, "lr": nan} at step 7 --JsonlWriter--> {"step": 7, "loss": 2.5, "lr": "NaN"} --read_metrics--> the same

Numbers are written with the fewest digits that read back as the same float64, so float32 and bfloat16 values return bit
for bit. JSON has no NaN or infinity: these become the strings "NaN", "Infinity" and "-Infinity", which Python's float()
and JavaScript's Number() both read.
"""

import json
import logging
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from moejax.errors import UserError
from moejax.observe.append_file import AppendFile, write_error

FILE_NAME = "metrics.jsonl"
_WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_logger = logging.getLogger(__name__)

type Value = float | int | list["Value"]


class JsonlWriter:
    """Appends to run_dir/metrics.jsonl; see `writers.open_writers` for `resume_step`."""

    def __init__(self, run_dir: Path, resume_step: int | None):
        path = run_dir / FILE_NAME
        cut_after(path, resume_step)
        self._file = AppendFile(path)

    def write(self, step: int, metrics: Mapping[str, Value]) -> None:
        self._file.append(encode_line(step, metrics))

    def close(self) -> None:
        self._file.close()


def encode_line(step: int, metrics: Mapping[str, Value]) -> bytes:
    """One line: "step" first, then the keys in the order given."""
    record = {"step": step} | {key: _words(value) for key, value in metrics.items()}
    return json.dumps(record, allow_nan=False, ensure_ascii=False).encode() + b"\n"


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The records of a metrics.jsonl, or of the one in a run folder, non-finite numbers restored.

    Lines that are no record are passed over: a run that is still being written may show half of its last line.
    Raises UserError if there is no such file.
    """
    path = Path(path)
    path = path / FILE_NAME if path.is_dir() else path
    if not path.is_file():
        raise UserError(f"There is no {path}; name a run folder whose run.writers included jsonl.")
    return [{key: _numbers(value) for key, value in record.items()} for _, record in _lines(path) if record is not None]


def cut_after(path: Path, last_step: int | None) -> None:
    """Leave only whole records of steps <= last_step (None: no record at all) in `path`, each ending its line.

    The file is replaced in one rename, and only if something changes; a full disk leaves it as it was (UserError).
    """
    if not path.is_file():  # absent, or a device such as /dev/stdout: nothing to keep
        return

    try:
        keep, unreadable, changed = [], [], False
        for line, record in _lines(path):
            keep.append(record is not None and last_step is not None and record["step"] <= last_step)
            changed |= not keep[-1] or not line.endswith(b"\n")
            if record is None:
                unreadable.append(len(keep))
        if not changed:
            return
        if last_step is not None and any(number != len(keep) for number in unreadable):
            # A kill can only halve the last line. Anything else came from outside, and is worth a word.
            _logger.warning("%s: lines %s were no records and are left out.", path, _listed(unreadable))
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            with open(path, "rb") as file, open(temporary, "wb") as out:
                out.writelines(line.rstrip(b"\n") + b"\n" for line, kept in zip(file, keep, strict=True) if kept)
                out.flush()
                os.fsync(out.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise write_error(path, error) from error


def _lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
    """Every line with its record; None if it is not one (halved, empty, zero-filled by a power cut, ...)."""
    with open(path, "rb") as file:
        for line in file:
            try:
                record = json.loads(line)
            except ValueError:
                record = None
            whole = isinstance(record, dict) and type(record.get("step")) is int
            yield line, record if whole else None


def _words(value: Value) -> Any:
    if isinstance(value, list):
        return [_words(item) for item in value]
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _numbers(value: Any) -> Any:
    if isinstance(value, list):
        return [_numbers(item) for item in value]
    return _WORDS.get(value, value) if isinstance(value, str) else value


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:5])) + (f" and {len(numbers) - 5} more" if len(numbers) > 5 else "")
