"""Documents to one memory-mapped token file, made once and kept in a cache.

    paths --sources--> pieces of text --tokenizer--> ids, document after document, an end-of-document id after each
        --append--> a private folder in the cache
        --rename--> <cache>/<key>/{tokens.npy, documents.npy, moejax-tokens.json}

`key` hashes what the tokens depend on: the files (path, size, time of change), the tokenizer, this format. The rename
is the only moment at which the entry appears, and it appears whole: a crash, a full disk or a second process doing the
same never shows a reader half a file. Writes are plain writes, since a full disk kills a process that writes through
a memory map, without a word.

A path may also be such an entry itself, or any one-dimensional `.npy` of token ids; of the latter only the index
(documents.npy and moejax-tokens.json) goes to the cache, the ids stay where they are.
"""

import contextlib
import errno
import hashlib
import itertools
import json
import os
import secrets
import shutil
import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from moejax.data.sources import Piece, find_files, read_pieces
from moejax.data.tokenizers import Tokenizer
from moejax.errors import UserError

FORMAT = "moejax-tokens-1"
META = "moejax-tokens.json"
_CHUNK = 1 << 24  # ids looked at in one go, 64 MiB of uint32
_BATCH_CHARACTERS = 1 << 22  # text handed to the tokenizer in one go
_ABANDONED_AFTER_S = 3600.0

Progress = Callable[[int, int], None]
"""Called with (bytes of source files done, bytes in all) as a corpus is tokenised."""


@dataclass(frozen=True, eq=False)
class TokenFile:
    """Token ids of a corpus, memory-mapped.

    tokens: uint16 or uint32 [tokens] (of a foreign `.npy`: whatever integers it holds), read-only.
    document_starts: int64[documents + 1]; document i is tokens[document_starts[i]:document_starts[i+1]], its
        end-of-document id included; the last entry is the number of tokens.
    fingerprint: hash of the stored ids, the same on every machine and wherever the file lies.
    """

    path: Path
    tokens: np.ndarray
    document_starts: np.ndarray
    end_of_document_id: int
    max_token_id: int
    tokenizer_fingerprint: str | None
    fingerprint: str

    def __len__(self) -> int:
        return len(self.tokens)


def open_corpus(
    paths: Iterable[str | Path],
    tokenizer: Tokenizer,
    cache_dir: str | Path,
    *,
    vocab_size: int | None = None,
    progress: Progress | None = None,
) -> list[TokenFile]:
    """Token files for `paths`, in their order: text is tokenised (once, see above), token files are opened.

    No paths: Python's own standard library. vocab_size: that of the model; default, the tokenizer's.
    Raises UserError: what `find_files` and `read_pieces` raise, a corpus without a token, an id outside the
    vocabulary, tokens made by another tokenizer, a damaged entry, a cache that cannot be written (full, read-only).
    """
    cache_dir = Path(cache_dir).expanduser()
    entries = [Path(path).expanduser() for path in paths]
    corpus: list[TokenFile] = []
    for are_tokens, group in itertools.groupby(entries, _holds_tokens):
        if are_tokens:
            corpus += [_open_tokens(path, tokenizer, cache_dir) for path in group]
        else:
            corpus.append(tokenize_files(find_files(group), tokenizer, cache_dir, progress=progress))
    if not entries:
        corpus = [tokenize_files(find_files([]), tokenizer, cache_dir, progress=progress)]
    limit = tokenizer.vocab_size if vocab_size is None else vocab_size
    for file in corpus:
        if file.max_token_id >= limit:
            check_vocabulary(file.tokens, limit, file.path)
    return corpus


def tokenize_files(
    files: list[Path], tokenizer: Tokenizer, cache_dir: Path, *, progress: Progress | None = None
) -> TokenFile:
    """The token file of text `files`, from the cache or made now. Raises UserError as `open_corpus` does."""
    stats = [(str(file.resolve()), (stat := file.stat()).st_size, stat.st_mtime_ns) for file in files]
    key = _hash(FORMAT, tokenizer.fingerprint, *map(repr, stats))
    dtype = np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32

    def build(folder: Path) -> dict[str, Any]:
        with open(folder / "tokens.npy", "wb") as out:
            writer = _TokenWriter(out, np.dtype(dtype), tokenizer)
            total = sum(size for _, size, _ in stats)
            done = 0
            for file, (_, size, _) in zip(files, stats, strict=True):
                writer.add(read_pieces(file))
                done += size
                if progress is not None:
                    progress(done, total)
            writer.finish()
        if not writer.count:
            raise UserError(f"the corpus is empty: no text in {_names(files)}; give data.paths some text.")
        _save(folder / "documents.npy", np.frombuffer(writer.document_starts, np.int64))
        return {"tokens": "tokens.npy", "fingerprint": writer.digest.hexdigest(), "max_token_id": writer.max_id}

    return _load(_cached(cache_dir, key, build, tokenizer), tokenizer)


def check_vocabulary(tokens: np.ndarray, vocab_size: int, path: str | Path) -> int:
    """The largest id in `tokens`, read in chunks (any size of memory map).

    Raises UserError: an id outside [0, vocab_size); the first one is named, with its place, the file and vocab_size.
    """
    largest = -1
    for start in range(0, len(tokens), _CHUNK):
        chunk = tokens[start : start + _CHUNK]
        low, high = int(chunk.min()), int(chunk.max())
        if low < 0 or high >= vocab_size:
            place = int(np.argmax((chunk < 0) | (chunk >= vocab_size)))
            raise UserError(
                f"token id {int(chunk[place])} at position {start + place} of {path} is outside the vocabulary of "
                f"{vocab_size} ids: set model.vocab_size above the largest id, or use the tokenizer of these tokens."
            )
        largest = max(largest, high)
    return largest


class _TokenWriter:
    """Appends documents to an open `tokens.npy`, which gets its true header in `finish`."""

    def __init__(self, out: IO[bytes], dtype: np.dtype, tokenizer: Tokenizer):
        self.count, self.max_id = 0, -1
        self.document_starts = array("q", [0])
        self.digest = hashlib.sha256()
        self._out, self._dtype, self._tokenizer = out, dtype, tokenizer
        self._waiting: list[Piece] = []
        self._waiting_characters = 0
        self._header()

    def add(self, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            self._waiting.append(piece)
            self._waiting_characters += len(piece.text)
            if self._waiting_characters >= _BATCH_CHARACTERS:
                self._flush()

    def finish(self) -> None:
        self._flush()
        self._out.seek(0)
        self._header()
        _sync(self._out)

    def _header(self) -> None:
        # NumPy leaves room in the header for a first axis of any length, so that it can be rewritten in place.
        header = {"descr": self._dtype.str, "fortran_order": False, "shape": (self.count,)}
        np.lib.format.write_array_header_1_0(self._out, header)

    def _flush(self) -> None:
        end = np.asarray([self._tokenizer.end_of_document_id], self._dtype)
        for piece, ids in zip(
            self._waiting, self._tokenizer.encode_batch([piece.text for piece in self._waiting]), strict=True
        ):
            self._write(ids.astype(self._dtype), int(ids.max(initial=-1)))
            if piece.ends_document:
                self._write(end, self._tokenizer.end_of_document_id)
                self.document_starts.append(self.count)
        self._waiting, self._waiting_characters = [], 0

    def _write(self, ids: np.ndarray, largest: int) -> None:
        data = ids.tobytes()
        self._out.write(data)
        self.digest.update(data)
        self.count += len(ids)
        self.max_id = max(self.max_id, largest)


def _holds_tokens(path: Path) -> bool:
    return path.suffix == ".npy" or path.name == META or (path / META).is_file()


def _open_tokens(path: Path, tokenizer: Tokenizer, cache_dir: Path) -> TokenFile:
    """One of our entries (its folder, or a file in it) or a foreign `.npy`."""
    folder = path if path.is_dir() else path.parent
    if (folder / META).is_file() and path.name not in {"documents.npy"}:
        return _load(folder, tokenizer)
    if not path.is_file():
        raise UserError(f"data path {path} does not exist: check data.paths (relative to {Path.cwd()}).")
    try:
        tokens = _map(path)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path} holds no token ids ({error}): it must be a .npy file as numpy.save writes it, with one "
            "axis of integers."
        ) from error
    if not len(tokens):
        raise UserError(f"the corpus is empty: {path} holds no token; give data.paths some text.")
    stat = path.stat()
    key = _hash(
        FORMAT, str(tokenizer.end_of_document_id), str(path.resolve()), str(stat.st_size), str(stat.st_mtime_ns)
    )

    def index(folder: Path) -> dict[str, Any]:
        digest = hashlib.sha256()
        smallest, largest, ends = 0, -1, []
        for start in range(0, len(tokens), _CHUNK):
            chunk = np.ascontiguousarray(tokens[start : start + _CHUNK])
            digest.update(chunk)
            smallest, largest = min(smallest, int(chunk.min())), max(largest, int(chunk.max()))
            ends.append(np.flatnonzero(chunk == tokenizer.end_of_document_id) + start + 1)
        bounds = np.unique(np.concatenate([[0], *ends, [len(tokens)]])).astype(np.int64)
        _save(folder / "documents.npy", bounds)
        if smallest < 0:
            check_vocabulary(tokens, tokenizer.vocab_size, path)
        return {"tokens": str(path.resolve()), "fingerprint": digest.hexdigest(), "max_token_id": largest}

    return _load(_cached(cache_dir, key, index, None), tokenizer)


def _load(folder: Path, tokenizer: Tokenizer) -> TokenFile:
    try:
        meta = json.loads((folder / META).read_text("utf-8"))
        if meta["format"] != FORMAT:
            raise UserError(
                f"{folder} has the format {meta['format']}, this program reads {FORMAT}: tokenise it again."
            )
        made_by = meta["tokenizer_fingerprint"]
        path = folder / meta["tokens"]  # an absolute path stays itself
        starts = _map(folder / "documents.npy")
        tokens = _map(path)
        if len(tokens) != meta["token_count"] or not len(starts) or starts[-1] != len(tokens):
            raise ValueError(f"{len(tokens)} tokens where {meta['token_count']} were written")
        max_token_id, fingerprint = int(meta["max_token_id"]), str(meta["fingerprint"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"the token file in {folder} is damaged ({error}): make it from its text again (an entry of the cache "
            "comes back by itself once its folder is deleted)."
        ) from error
    if made_by not in (None, tokenizer.fingerprint):
        raise UserError(
            f"{path} was made by the tokenizer {meta['tokenizer']} (fingerprint {made_by}), this run uses "
            f"{tokenizer.name} ({tokenizer.fingerprint}): set data.tokenizer to the first, or give the text itself."
        )
    return TokenFile(path, tokens, starts, tokenizer.end_of_document_id, max_token_id, made_by, fingerprint)


def _map(path: Path) -> np.ndarray:
    """A one-dimensional integer `.npy`, memory-mapped. Raises ValueError or OSError: it is not one, or not whole."""
    array = np.load(path, mmap_mode="r", allow_pickle=False)
    if not isinstance(array, np.ndarray) or array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise ValueError("not a one-dimensional array of integers")
    return array


def _cached(cache_dir: Path, key: str, build: Callable[[Path], dict[str, Any]], tokenizer: Tokenizer | None) -> Path:
    """The folder of entry `key`, made by `build` if it is not there: whole or not at all, whoever else is doing it."""
    final = cache_dir / key
    if (final / META).is_file():
        return final
    with _readable_write_errors(cache_dir):
        cache_dir.mkdir(parents=True, exist_ok=True)
        with _alone(cache_dir / f".{key}.lock") as alone:
            if (final / META).is_file():
                return final
            if alone:
                _remove_abandoned(cache_dir, key)
            folder = cache_dir / f".{key}.{secrets.token_hex(8)}.tmp"
            folder.mkdir()
            try:
                meta = {
                    "format": FORMAT,
                    "tokenizer": tokenizer and tokenizer.name,
                    "tokenizer_fingerprint": tokenizer and tokenizer.fingerprint,
                    **build(folder),
                    "token_count": int(np.load(folder / "documents.npy", mmap_mode="r")[-1]),
                }
                with open(folder / META, "w", encoding="utf-8") as out:
                    json.dump(meta, out, indent=1)
                    _sync(out)
                _publish(folder, final)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
    return final


def _publish(folder: Path, final: Path) -> None:
    """Moves the finished folder to its name, unless another process was first, with the same content."""
    try:
        os.rename(folder, final)
    except OSError:
        if (final / META).is_file():
            return
        shutil.rmtree(final)  # an entry that somebody deleted half of
        os.rename(folder, final)


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[bool]:
    """Waits for other processes that build the same entry; false where the file system knows no locks.

    Only a saving of work: without the lock the entry is built twice, and the rename keeps one.
    """
    try:
        import fcntl
    except ImportError:  # not a POSIX system
        yield False
        return
    with open(path, "a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:
            yield False
        else:
            try:
                yield True
            finally:
                path.unlink(missing_ok=True)


def _remove_abandoned(cache_dir: Path, key: str) -> None:
    """Deletes what killed processes left of this entry. The hour of grace is for machines that do not see our lock."""
    for folder in cache_dir.glob(f".{key}.*.tmp"):
        with contextlib.suppress(OSError):
            newest = max(path.stat().st_mtime for path in [folder, *folder.iterdir()])
            if time.time() - newest > _ABANDONED_AFTER_S:
                shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _readable_write_errors(cache_dir: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            problem = "there is no room for it; free some space"
        elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST):
            problem = "no folder can be written there; make it writable"
        else:
            raise
        raise UserError(
            f"cannot write the token cache {cache_dir} ({error.strerror}): {problem} or set another cache folder with "
            "data.cache_dir=FOLDER."
        ) from error


def _save(path: Path, array: np.ndarray) -> None:
    with open(path, "wb") as out:
        np.save(out, array)
        _sync(out)


def _sync(out: IO[Any]) -> None:
    out.flush()
    os.fsync(out.fileno())


def _hash(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogateescape")).hexdigest()[:24]


def _names(files: list[Path]) -> str:
    shown = ", ".join(map(str, files[:3]))
    return shown if len(files) <= 3 else f"{shown} and {len(files) - 3} more files"
