"""TensorBoard event files, written by this thread, record by record.

    metrics of a step --> one Event (scalars; a histogram per list) --> length, crc, bytes, crc --> events file

The packages' own SummaryWriter hands events to a background thread: a SIGKILL loses what waits there, and a full disk
ends the thread, after which the run blocks on its queue for ever (seen with tensorboardX 2.6.5, 2026-11). Here only
their message types and checksum are used, from tensorboardX or else tensorboard; neither brings torch or TensorFlow.
"""

import importlib
import os
import socket
import struct
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from moejax.observe.append_file import AppendFile

# (messages, checksum) of the packages that can do it, in order of preference.
PACKAGES = {
    "tensorboardX": ("tensorboardX.proto", "tensorboardX.record_writer"),
    "tensorboard": ("tensorboard.compat.proto", "tensorboard.compat.tensorflow_stub.pywrap_tensorflow"),
}
_BINS = 32


class EventFileWriter:
    """One new event file in run_dir per start, as TensorBoard expects.

    At resume it opens with a session start at resume_step + 1: TensorBoard then forgets what earlier files hold from
    that step on. Raises ImportError if neither package is there, UserError if the folder cannot be written.
    """

    def __init__(self, run_dir: Path, resume_step: int | None):
        self._event_pb2, self._summary_pb2, self._checksum = _message_types()
        # The start to the microsecond keeps two starts within a second apart, and sorts.
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        self._file = AppendFile(run_dir / name)
        self._append(file_version="brain.Event:2")
        start = self._event_pb2.SessionLog(status=self._event_pb2.SessionLog.START)
        self._append(step=0 if resume_step is None else resume_step + 1, session_log=start)

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        values = [
            self._summary_pb2.Summary.Value(tag=key, histo=self._histogram(value))
            if isinstance(value, list)
            else self._summary_pb2.Summary.Value(tag=key, simple_value=_float32(value))
            for key, value in sorted(metrics.items())
        ]
        self._append(step=step, summary=self._summary_pb2.Summary(value=values))

    def close(self) -> None:
        self._file.close()

    def _histogram(self, values: list[Any]) -> Any:
        flat = finite_values(values)
        counts, edges = np.histogram(flat, _BINS) if flat.size else (np.zeros(1), np.zeros(2))
        return self._summary_pb2.HistogramProto(
            min=flat.min() if flat.size else 0.0,
            max=flat.max() if flat.size else 0.0,
            num=flat.size,
            sum=flat.sum(),
            sum_squares=np.square(flat).sum(),
            bucket_limit=edges[1:].tolist(),
            bucket=counts.tolist(),
        )

    def _append(self, **fields: Any) -> None:
        data = self._event_pb2.Event(wall_time=time.time(), **fields).SerializeToString()
        header = struct.pack("<Q", len(data))
        self._file.append(b"".join([header, self._crc(header), data, self._crc(data)]))

    def _crc(self, data: bytes) -> bytes:
        return struct.pack("<I", self._checksum(data))


def finite_values(values: list[Any]) -> np.ndarray:
    """Nested lists of numbers to float64[n], non-finite ones left out: no histogram can hold them."""
    flat: list[float] = []
    for value in values:
        flat.extend(finite_values(value) if isinstance(value, list) else [value])
    array = np.asarray(flat, np.float64)
    return array[np.isfinite(array)]


def _float32(value: float) -> float:
    """Rounded to float32 as the file holds it; what lies beyond becomes an infinity instead of an error."""
    with np.errstate(over="ignore"):
        return float(np.float32(value))


def _message_types() -> tuple[Any, Any, Callable[[bytes], int]]:
    for number, (messages, checksum) in enumerate(PACKAGES.values(), 1):
        try:
            event_pb2 = importlib.import_module(f"{messages}.event_pb2")
            summary_pb2 = importlib.import_module(f"{messages}.summary_pb2")
            return event_pb2, summary_pb2, importlib.import_module(checksum).masked_crc32c
        except ImportError:
            if number == len(PACKAGES):
                raise
    raise AssertionError("PACKAGES is not empty")
