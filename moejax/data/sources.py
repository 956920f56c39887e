"""Paths to documents: text files, folders, `.jsonl(.gz)`, or Python's own standard library.

    paths --find_files--> files, in a fixed order --read_pieces--> (text, does it end a document) ...

One text file is one document, one line of a `.jsonl` file is one document. A document arrives in pieces of about
`PIECE_CHARACTERS`, so that a corpus of one huge file needs no more memory than one of many small ones.
Every file is UTF-8 (a leading byte order mark is dropped); line ends stay as they are, on every system.
"""

import codecs
import glob
import gzip
import json
import os
import sysconfig
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from moejax.errors import UserError

JSONL_SUFFIXES = (".jsonl", ".jsonl.gz", ".ndjson", ".ndjson.gz", ".json.gz")
"""One JSON object with a "text" key per line; `.json.gz` is what the Dolma corpora call it."""

TEXT_SUFFIXES = tuple(
    ".txt .text .txt.gz .md .rst .tex .html .py .pyi .sh .sql .c .h .cc .cpp .hpp .cu .cuh "
    ".java .js .ts .go .rs .rb .pl .php .lua .jl .r .scala .swift .kt .hs .ml".split()
)
"""What a folder is searched for, besides `JSONL_SUFFIXES`; a file named by itself is read whatever its suffix."""

PIECE_CHARACTERS = 1 << 20

_SKIPPED_FOLDERS = {"__pycache__", "node_modules"}
_SKIPPED_IN_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
_WIDE_ENCODINGS = ((codecs.BOM_UTF32_LE, "UTF-32"), (codecs.BOM_UTF16_LE, "UTF-16"), (codecs.BOM_UTF16_BE, "UTF-16"))


class Piece(NamedTuple):
    """A stretch of one document, never empty; `ends_document` is true on its last piece."""

    text: str
    ends_document: bool


def find_files(paths: Iterable[str | Path]) -> list[Path]:
    """The files behind `paths` (files, folders, glob patterns), each once; with no paths, `standard_library_files()`.

    Entries keep their order; within a folder or a pattern files are sorted by relative path, "/" between its parts, so
    that neither the file system nor the locale matters. Folders are searched through symbolic links; names that begin
    with a dot and `__pycache__` are left out.

    Raises UserError: a path that does not exist, or a folder or pattern without any text in it.
    """
    paths = [Path(path).expanduser() for path in paths]
    if not paths:
        return standard_library_files()
    found: dict[str, Path] = {}
    for path in paths:
        try:
            files = _expand(path)
        except OSError as error:
            raise UserError(f"data path {path} cannot be read: {error.filename}: {error.strerror}.") from error
        for file in files:
            found.setdefault(os.path.realpath(file), file)
    return list(found.values())


def standard_library_files() -> list[Path]:
    """The `.py` files of the running interpreter's standard library, in a fixed order: real text on every machine.

    Left out: installed packages and the test suites (some systems ship Python without them), `_sysconfigdata*`
    (it describes the machine) and whatever is not UTF-8.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = [
        file
        for file in _walk(root, (".py",), _SKIPPED_IN_LIBRARY)
        if not file.name.startswith("_sysconfigdata") and _is_utf8(file)
    ]
    if not files:
        raise UserError(f"this Python keeps no source of its standard library in {root}: give data.paths some text.")
    return files


def read_pieces(file: Path) -> Iterator[Piece]:
    """The documents of one file, in pieces; documents without any text are left out.

    Long documents are cut after a line end where there is one, which is where byte-pair tokenizers break anyway.
    Half a surrogate pair in JSON ("\\ud800"), which no UTF-8 text can hold, becomes U+FFFD.

    Raises UserError: the file cannot be read, is not UTF-8, is damaged gzip, or a line of it is not a JSON object
    with a string under "text" (the line is named).
    """
    try:
        with open(file, "rb") as raw:
            stream: BinaryIO = gzip.open(raw) if file.name.endswith(".gz") else raw  # type: ignore[assignment]
            if file.name.endswith(JSONL_SUFFIXES):
                for text in _json_lines(stream, file):
                    yield from _pieces(text[i : i + PIECE_CHARACTERS] for i in range(0, len(text), PIECE_CHARACTERS))
            else:
                yield from _pieces(_decode(stream, file))
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(f"{file} is damaged or not gzip ({error}): fetch it again or leave it out.") from error
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror or error}.") from error


def _expand(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if path.is_dir():
        files = _walk(path, TEXT_SUFFIXES + JSONL_SUFFIXES, _SKIPPED_FOLDERS)
        if not files:
            suffixes = ", ".join(JSONL_SUFFIXES[:2] + TEXT_SUFFIXES[:4])
            raise UserError(
                f"folder {path} holds no text: no file in it ends in {suffixes} or another known suffix; "
                "name the files themselves to read them whatever they are called."
            )
        return files
    matches = sorted(Path(match) for match in glob.glob(str(path), recursive=True))
    files = [file for match in matches for file in ([match] if match.is_file() else _expand(match))]
    if not files:
        raise UserError(f"data path {path} does not exist: check data.paths (relative to {Path.cwd()}).")
    return files


def _walk(root: Path, suffixes: tuple[str, ...], skipped: set[str]) -> list[Path]:
    """Files under `root` that end in one of `suffixes`, sorted by relative POSIX path; each real folder once."""
    files: list[Path] = []
    seen: set[str] = set()
    for folder, subfolders, names in os.walk(root, onerror=_raise, followlinks=True):
        real = os.path.realpath(folder)
        if real in seen:  # a link back up the tree
            subfolders.clear()
            continue
        seen.add(real)
        subfolders[:] = sorted(name for name in subfolders if name not in skipped and not name.startswith("."))
        files += [
            file
            for name in names
            if name.lower().endswith(suffixes) and not name.startswith(".") and (file := Path(folder, name)).is_file()
        ]
    return sorted(files, key=lambda file: file.relative_to(root).as_posix())


def _raise(error: OSError) -> None:
    raise error


def _is_utf8(file: Path) -> bool:
    try:
        file.read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _pieces(parts: Iterable[str]) -> Iterator[Piece]:
    """One document that comes in `parts`, cut anew into pieces; nothing at all for an empty document."""
    held = ""
    for part in parts:
        held += part
        while len(held) > PIECE_CHARACTERS:
            cut = held.rfind("\n", 0, PIECE_CHARACTERS) + 1 or PIECE_CHARACTERS
            yield Piece(held[:cut], False)
            held = held[cut:]
    if held:
        yield Piece(held, True)


def _decode(stream: BinaryIO, file: Path) -> Iterator[str]:
    """The text of a UTF-8 stream, block by block. Raises UserError: not UTF-8, with the offset and a guess."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    offset, at_start = 0, True
    while True:
        block = stream.read(PIECE_CHARACTERS)
        pending = len(decoder.getstate()[0])
        try:
            text = decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            raise _not_utf8(file, error, offset - pending, block if offset == 0 else b"") from error
        yield text.removeprefix("\ufeff") if at_start else text
        offset, at_start = offset + len(block), at_start and not text
        if not block:
            return


def _not_utf8(file: Path, error: UnicodeDecodeError, start: int, head: bytes) -> UserError:
    guess = next((name for mark, name in _WIDE_ENCODINGS if head.startswith(mark)), None)
    where = f"byte 0x{error.object[error.start]:02x} at offset {start + error.start}"
    looks = f"it begins like {guess}" if guess else where
    return UserError(f"{file} is not UTF-8 text ({looks}): convert it (iconv -t utf-8) or leave it out of data.paths.")


def _json_lines(stream: BinaryIO, file: Path) -> Iterator[str]:
    """The "text" of every line; blank lines are passed over."""
    for number, line in enumerate(stream, 1):
        line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
        if not line.strip():
            continue
        try:
            record = json.loads(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise UserError(
                f"{file}, line {number} is not UTF-8 text (byte 0x{line[error.start]:02x}, column {error.start + 1}): "
                "convert the file (iconv -t utf-8)."
            ) from error
        except (ValueError, RecursionError) as error:
            raise UserError(
                f'{file}, line {number} is not JSON ({error}): each line must be one object with a "text" key.'
            ) from error
        text = record.get("text") if isinstance(record, dict) else None
        if not isinstance(text, str):
            raise UserError(f'{file}, line {number} has no "text" key with a string in it, which every line must have.')
        yield _without_surrogates(text)


def _without_surrogates(text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
