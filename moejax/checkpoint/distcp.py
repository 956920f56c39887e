"""PyTorch distributed checkpoints (`torch.distributed.checkpoint`), read without torch and without trusting the pickle.

    .metadata --a pickle, by an unpickler with a table of inert names--> tensors: shape, dtype, chunks
    chunk: (file, offset, length) --a zip archive as `torch.save` writes it--> its numbers --> tensor, chunk by chunk

A pickle is a program. Every name it asks for is looked up in a table of inert stand-ins (`KNOWN`); one that is not
there ends the reading before anything is called. Objects in the checkpoint that are no tensors are never read at all.
"""

import io
import math
import os
import pickle
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import ml_dtypes
import numpy as np

from moejax.errors import UserError

METADATA = ".metadata"
PART = 16 * 2**20  # bytes read at a time


class _Record:
    """Stands in for a dataclass of torch: keeps its state, does nothing."""

    state: Any

    def __init__(self, *arguments: Any):
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict):
            state = {**(state[0] or {}), **state[1]}
        self.state = state

    def field(self, name: str) -> Any:
        return self.state[name]  # pyright: ignore[reportCallIssue, reportArgumentType]


class _Tensors(_Record):
    pass


class _Bytes(_Record):
    pass


class _Properties(_Record):
    pass


class _Index(_Record):
    pass


class _Place(_Record):
    pass


class _Chunk(_Record):
    pass


class _Top(_Record):
    pass


class _Numbers(NamedTuple):
    """Stands in for a dtype of torch or for a storage class of one. Not numpy's own, which a pickle could alter."""

    dtype: np.dtype


def _size(*arguments: Any) -> tuple[int, ...]:
    return tuple(int(n) for n in arguments[0]) if arguments else ()


def _nothing(*arguments: Any) -> None:
    """Stands in for what has no influence: layouts, memory formats, paths."""


def _mapping(*arguments: Any) -> dict[Any, Any]:
    return {}


def _rebuild(storage: Any, offset: int, size: Any, stride: Any, *_: Any) -> tuple[Any, int, Any, Any]:
    return storage, offset, size, stride


DTYPES: dict[str, Any] = {
    "float64": np.float64,
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "int64": np.int64,
    "int32": np.int32,
    "int16": np.int16,
    "int8": np.int8,
    "uint8": np.uint8,
    "bool": np.bool_,
}
_STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
}
_OF_METADATA = "torch.distributed.checkpoint.metadata"
KNOWN: dict[tuple[str, str], Any] = {
    (_OF_METADATA, "Metadata"): _Top,
    (_OF_METADATA, "TensorStorageMetadata"): _Tensors,
    (_OF_METADATA, "BytesStorageMetadata"): _Bytes,
    (_OF_METADATA, "TensorProperties"): _Properties,
    (_OF_METADATA, "ChunkStorageMetadata"): _Chunk,
    (_OF_METADATA, "MetadataIndex"): _Index,
    (_OF_METADATA, "StorageMeta"): _Record,
    (_OF_METADATA, "_MEM_FORMAT_ENCODING"): _nothing,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _Place,
    ("torch.serialization", "_get_layout"): _nothing,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild,
    ("torch", "Size"): _size,
    ("collections", "OrderedDict"): _mapping,
    **{(module, name): _nothing for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath")},
    **{("torch", name): _Numbers(np.dtype(dtype)) for name, dtype in DTYPES.items()},
    **{("torch", name): _Numbers(np.dtype(DTYPES[dtype])) for name, dtype in _STORAGES.items()},
}
"""Every name a pickle may use, and the stand-in it gets."""


class _Refused(Exception):
    pass


class _Unpickler(pickle.Unpickler):
    """Builds stand-ins; a name that is not in KNOWN ends it before anything is called."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in KNOWN:
            raise _Refused(f"{module}.{name}")
        return KNOWN[module, name]

    def persistent_load(self, pid: Any) -> Any:
        """("storage", its class, key, device, elements) in the pickle of a tensor: the key."""
        return pid


def _unpickle(data: bytes, where: str) -> Any:
    try:
        return _Unpickler(io.BytesIO(data)).load()
    except _Refused as refused:
        raise UserError(
            f"{where} asks for the Python object {refused}, which has no business in a checkpoint; nothing of it "
            f"was run, and "
            "it is not imported."
        ) from None
    except Exception as error:  # a damaged pickle fails in any way there is
        raise UserError(f"{where} is damaged, or was written by an unknown version of torch ({error}).") from error


class Chunk(NamedTuple):
    """A block of a tensor: where it begins, its sizes, and the bytes [start, start + length) of the file that hold
    it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


class Tensor(NamedTuple):
    shape: tuple[int, ...]
    dtype: np.dtype
    chunks: tuple[Chunk, ...]


class DistributedCheckpoint:
    """`tensors` by name, and `read` for one of them. others: names of objects that are no tensors, which stay unread.

    Raises UserError: no checkpoint, a shard missing or cut short, a pickle with a foreign name, a tensor with holes.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        try:
            data = (self.path / METADATA).read_bytes()
        except OSError as error:
            raise UserError(
                f"{self.path} is no distributed checkpoint of PyTorch: {METADATA} cannot be read "
                f"({(error.strerror or str(error)).lower()})."
            ) from error
        top = _unpickle(data, str(self.path / METADATA))
        try:
            self.tensors, self.others = self._tables(top)
        except UserError:
            raise
        except Exception as error:
            raise UserError(f"{self.path / METADATA} has not the structure of a checkpoint ({error!r}).") from error
        self._check_files()

    def _tables(self, top: Any) -> tuple[dict[str, Tensor], list[str]]:
        places: dict[tuple[str, tuple[int, ...]], Any] = {}
        for index, place in top.field("storage_data").items():
            state = index.state
            if state.get("offset") is not None:
                places[state["fqn"], tuple(state["offset"])] = place.state
        tensors, others = {}, []
        for name, entry in top.field("state_dict_metadata").items():
            if not isinstance(entry, _Tensors):
                others.append(name)
                continue
            shape, dtype = tuple(entry.field("size")), entry.field("properties").state[0].dtype
            chunks = []
            for piece in entry.field("chunks"):
                offsets, sizes = tuple(piece.field("offsets")), tuple(piece.field("sizes"))
                place = places[name, offsets]
                if place.get("transform_descriptors"):
                    raise UserError(f"{self.path}: tensor {name} is stored compressed, which cannot be read.")
                file = str(place["relative_path"])
                if Path(file).name != file:
                    raise UserError(f"{self.path}: tensor {name} lies in {file!r}, outside of the checkpoint.")
                chunks.append(Chunk(offsets, sizes, file, int(place["offset"]), int(place["length"])))
            tensors[name] = Tensor(shape, dtype, tuple(chunks))
            self._check_cover(name, tensors[name])
        return tensors, others

    def _check_cover(self, name: str, tensor: Tensor) -> None:
        """Chunks lie inside the tensor, do not overlap, and their volumes add up."""
        inside = all(
            len(chunk.offsets) == len(chunk.sizes) == len(tensor.shape)
            and all(
                0 <= o and 0 <= s and o + s <= n
                for o, s, n in zip(chunk.offsets, chunk.sizes, tensor.shape, strict=True)
            )
            for chunk in tensor.chunks
        )
        if not inside or sum(math.prod(chunk.sizes) for chunk in tensor.chunks) != math.prod(tensor.shape):
            raise UserError(f"{self.path}: the chunks of tensor {name} do not fill its shape {list(tensor.shape)}.")
        filled = [chunk for chunk in tensor.chunks if math.prod(chunk.sizes)]
        start = np.array([chunk.offsets for chunk in filled], np.int64).reshape(len(filled), -1)
        stop = start + np.array([chunk.sizes for chunk in filled], np.int64).reshape(start.shape)
        for i in range(1, len(filled)):
            if np.any(np.all((start[:i] < stop[i]) & (start[i] < stop[:i]), axis=1)):
                raise UserError(f"{self.path}: chunks of tensor {name} overlap.")

    def _check_files(self) -> None:
        ends: dict[str, int] = {}
        for tensor in self.tensors.values():
            for chunk in tensor.chunks:
                ends[chunk.file] = max(ends.get(chunk.file, 0), chunk.start + chunk.length)
        for file, end in ends.items():
            path = self.path / file
            if not path.is_file():
                raise UserError(f"{self.path} lacks {file}, which {METADATA} names; fetch the missing file.")
            if path.stat().st_size < end:
                raise UserError(
                    f"{path} is cut short: {path.stat().st_size:,} bytes, and its last tensor ends at {end:,}."
                )

    def read(self, name: str) -> np.ndarray:
        """The whole tensor, put together from its chunks; in memory: it, and one chunk."""
        tensor = self.tensors[name]
        if len(tensor.chunks) == 1:
            return self._read_chunk(name, tensor.dtype, tensor.chunks[0])
        out = np.empty(tensor.shape, tensor.dtype)
        for chunk in tensor.chunks:
            index = tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes, strict=True))
            out[index] = self._read_chunk(name, tensor.dtype, chunk)
        return out

    def _read_chunk(self, name: str, dtype: np.dtype, chunk: Chunk) -> np.ndarray:
        where = f"{self.path / chunk.file}, tensor {name},"
        try:
            with (
                _Window(self.path / chunk.file, chunk.start, chunk.length) as window,
                zipfile.ZipFile(window) as archive,
            ):
                root = archive.namelist()[0].split("/")[0]
                pickled = archive.read(f"{root}/data.pkl")
                (kind, storage, key, _, _), offset, size, stride = _unpickle(pickled, where)
                order = archive.read(f"{root}/byteorder") if f"{root}/byteorder" in archive.namelist() else b"little"
                plain = (kind, storage.dtype, offset, tuple(size), tuple(stride), order)
                if plain != ("storage", dtype, 0, chunk.sizes, _contiguous(chunk.sizes), b"little"):
                    raise UserError(f"{where} is stored in a way that cannot be read (a view, or big-endian).")
                out = np.empty(math.prod(chunk.sizes), dtype)
                with archive.open(f"{root}/data/{key}") as data:
                    if not _fill(out, data):
                        raise UserError(f"{where} has not the size that {METADATA} says.")
        except UserError:
            raise
        except Exception as error:  # zipfile, and unpacking of what is no tensor
            raise UserError(f"{where} is damaged ({error}); copy the file anew.") from error
        return out.reshape(chunk.sizes)


def _fill(out: np.ndarray, data: IO[bytes]) -> bool:
    """Reads the numbers of an array, a part at a time (zipfile holds what it reads twice); False if it is not them
    all."""
    to_fill, done = memoryview(out.view(np.uint8)), 0
    while part := data.read(min(PART, len(to_fill) - done + 1)):
        if done + len(part) > len(to_fill):
            return False
        to_fill[done : done + len(part)] = part
        done += len(part)
    return done == len(to_fill)


def _contiguous(sizes: Sequence[int]) -> tuple[int, ...]:
    """Strides of a row-major array."""
    return tuple(math.prod(sizes[axis + 1 :]) for axis in range(len(sizes)))


class _Window(io.RawIOBase):
    """Bytes [start, start + length) of a file, as a file of their own."""

    def __init__(self, path: Path, start: int, length: int):
        self._file, self._start, self._length, self._position = path.open("rb"), start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}[whence]
        self._position = max(0, base + offset)
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        count = max(0, min(len(view), self._length - self._position))
        self._file.seek(self._start + self._position)
        done = self._file.readinto(view[:count])
        self._position += done
        return done

    def close(self) -> None:
        self._file.close()
        super().close()
