"""One safetensors file: tensors by name, read from disk one by one, and written one by one.

    8 bytes: length n of the header | n bytes: JSON {name: {dtype, shape, data_offsets}, "__metadata__": {...}} | data

The package `safetensors` maps a file whole and builds one to write in memory; here no more than the tensor asked for is
in memory. A file that is not what its header says is refused when it is opened.
"""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np

from moejax.errors import UserError

DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
MOST_HEADER = 100_000_000  # bytes, as the package itself allows


class TensorInfo(NamedTuple):
    """dtype: as the header spells it. shape. start: byte in the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int


class SafetensorsFile:
    """`tensors` by name, and `read` for one of them. Raises UserError: not there, cut short, or inconsistent."""

    def __init__(self, path: Path):
        self.path = path
        try:
            size = path.stat().st_size
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                header = file.read(length) if 0 < length <= min(MOST_HEADER, size) else b""
        except OSError as error:
            raise UserError(f"{path} cannot be read ({(error.strerror or str(error)).lower()}).") from error
        try:
            entries = json.loads(header)
            entries.pop("__metadata__", None)
            self.tensors = {name: self._entry(name, entry, 8 + length, size) for name, entry in entries.items()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise UserError(
                f"{path} is no safetensors file, or the beginning of it is damaged; copy it anew."
            ) from error

    def _entry(self, name: str, entry: dict, base: int, size: int) -> TensorInfo:
        shape, (start, stop) = tuple(map(int, entry["shape"])), entry["data_offsets"]
        if entry["dtype"] not in DTYPES:
            raise UserError(
                f"{self.path}: tensor {name} has the dtype {entry['dtype']}, which cannot be imported; "
                f"{', '.join(DTYPES)} can."
            )
        if min(shape, default=0) < 0 or stop - start != math.prod(shape) * DTYPES[entry["dtype"]].itemsize or start < 0:
            raise UserError(
                f"{self.path}: the header gives tensor {name} a place of the wrong size; copy the file anew."
            )
        if base + stop > size:
            raise UserError(
                f"{self.path} is cut short: it ends at byte {size:,}, and tensor {name} would end at {base + stop:,}; "
                "copy it anew."
            )
        return TensorInfo(entry["dtype"], shape, base + start)

    def read(self, name: str) -> np.ndarray:
        info = self.tensors[name]
        count = math.prod(info.shape)
        data = np.fromfile(self.path, DTYPES[info.dtype], count, offset=info.start)
        if data.size != count:
            raise UserError(f"{self.path} has become shorter while it was being read.")
        return data.reshape(info.shape)


def write(path: Path, tensors: Mapping[str, tuple[str, tuple[int, ...]]], make: Callable[[str], np.ndarray]) -> None:
    """Write a file of these tensors, name to (dtype, shape); `make` gives each when its turn comes. Raises OSError."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}  # transformers asks for it
    offset = 0
    for name, (dtype, shape) in tensors.items():
        size = math.prod(shape) * DTYPES[dtype].itemsize
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for name, (dtype, shape) in tensors.items():
            data = make(name).astype(DTYPES[dtype])
            assert data.shape == shape, (name, data.shape, shape)
            file.write(np.ascontiguousarray(data).reshape(-1).view(np.uint8).data)
