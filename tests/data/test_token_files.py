"""Token files: every document in its place, made once, whole or not at all."""

import contextlib
import errno
import gzip
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moejax.data import sources, token_files
from moejax.data.token_files import META, TokenFile, check_vocabulary, open_corpus
from moejax.data.tokenizers import ByteTokenizer
from moejax.errors import UserError

BYTES = ByteTokenizer()


def texts_of(file: TokenFile) -> list[str]:
    """Documents decoded by their offsets; each must end with the end-of-document id and hold no other."""
    found = []
    starts = file.document_starts
    for start, stop in zip(starts[:-1], starts[1:], strict=True):
        *ids, end = file.tokens[start:stop].tolist()
        assert end == BYTES.end_of_document_id and end not in ids
        found.append(bytes(ids).decode("utf-8"))
    assert starts[0] == 0 and starts[-1] == len(file)
    return found


def write_texts(folder: Path, texts: list[str]) -> list[Path]:
    folder.mkdir(exist_ok=True)
    paths = [folder / f"{i:03}.txt" for i in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        path.write_bytes(text.encode("utf-8"))
    return paths


def left_in(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir()) if cache.exists() else []


@given(
    texts=st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=40), min_size=1, max_size=8),
    piece=st.integers(1, 20),
    batch=st.integers(1, 60),
)
def test_documents_come_back_in_order(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], piece: int, batch: int
):
    folder = tmp_path_factory.mktemp("corpus")
    lines = "".join(json.dumps({"text": text}) + "\n" for text in [*texts, "end"])
    (folder / "a.jsonl").write_text(lines)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "PIECE_CHARACTERS", piece)
        patch.setattr(token_files, "_BATCH_CHARACTERS", batch)
        (file,) = open_corpus([folder], BYTES, folder / "cache")
    assert texts_of(file) == [text for text in [*texts, "end"] if text]
    assert file.tokens.dtype == np.uint16 and isinstance(file.tokens, np.memmap)
    assert file.max_token_id == BYTES.end_of_document_id


def test_large_vocabularies_get_wider_ids(tmp_path: Path, cache: Path):
    class Wide(ByteTokenizer):
        vocab_size = 70_000
        end_of_document_id = 69_999
        fingerprint = "wide"

    (file,) = open_corpus(write_texts(tmp_path / "d", ["ab"]), Wide(), cache)
    assert file.tokens.dtype == np.uint32
    assert file.tokens.tolist() == [97, 98, 69_999]


def test_the_second_time_nothing_is_read(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch):
    paths = write_texts(tmp_path / "d", ["one", "two"])
    calls = []
    (first,) = open_corpus(paths, BYTES, cache, progress=lambda done, total: calls.append((done, total)))
    assert calls == [(3, 6), (6, 6)]
    monkeypatch.setattr(token_files, "read_pieces", lambda file: pytest.fail(f"{file} was read again"))
    (second,) = open_corpus(paths, BYTES, cache)
    assert second.path == first.path
    assert left_in(cache) == [first.path.parent.name]


def test_a_changed_file_or_tokenizer_makes_a_new_entry(tmp_path: Path, cache: Path):
    class Other(ByteTokenizer):
        fingerprint = "other"

    paths = write_texts(tmp_path / "d", ["one", "two"])
    (before,) = open_corpus(paths, BYTES, cache)
    paths[1].write_text("six")  # the same size
    os.utime(paths[1], ns=(1, 1))
    (after,) = open_corpus(paths, BYTES, cache)
    (reordered,) = open_corpus(paths[::-1], BYTES, cache)
    (other,) = open_corpus(paths, Other(), cache)
    assert texts_of(before) == ["one", "two"]
    assert texts_of(after) == ["one", "six"]
    assert texts_of(reordered) == ["six", "one"]
    assert len({file.path for file in (before, after, reordered, other)}) == 4


def test_the_fingerprint_follows_the_ids_not_the_place(tmp_path: Path, cache: Path):
    (here,) = open_corpus(write_texts(tmp_path / "here", ["one", "two"]), BYTES, cache)
    (there,) = open_corpus(write_texts(tmp_path / "there", ["one", "two"]), BYTES, cache)
    (changed,) = open_corpus(write_texts(tmp_path / "changed", ["one", "too"]), BYTES, cache)
    assert here.path != there.path and here.fingerprint == there.fingerprint != changed.fingerprint


def test_the_default_corpus_is_tokenised(cache: Path):
    (file,) = open_corpus([], BYTES, cache)
    starts = file.document_starts
    assert len(starts) > 500 and len(file) > 5_000_000
    text = bytes(file.tokens[starts[0] : starts[1] - 1].tolist()).decode()
    assert text == sources.standard_library_files()[0].read_bytes().decode()


@pytest.mark.parametrize("name", [".", META, "tokens.npy"])
def test_an_entry_can_be_given_as_a_path(tmp_path: Path, cache: Path, name: str):
    (made,) = open_corpus(write_texts(tmp_path / "d", ["one", "two"]), BYTES, cache)
    moved = made.path.parent.rename(tmp_path / "moved")
    (opened,) = open_corpus([moved / name], BYTES, tmp_path / "unused")
    assert texts_of(opened) == ["one", "two"]
    assert opened.fingerprint == made.fingerprint
    assert not (tmp_path / "unused").exists()


@pytest.mark.parametrize("dtype", [np.uint16, np.int64])
def test_a_foreign_npy_is_indexed_in_the_cache(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, dtype: type
):
    monkeypatch.setattr(token_files, "_CHUNK", 2)  # documents end on, before and after the edges of chunks
    path = tmp_path / "ids.npy"
    np.save(path, np.asarray([97, 256, 98, 99, 256, 256, 100], dtype))
    for _ in range(2):
        (file,) = open_corpus([path], BYTES, cache)
        assert file.document_starts.tolist() == [0, 2, 5, 6, 7]
        assert file.tokens.tolist() == [97, 256, 98, 99, 256, 256, 100]
        assert (file.max_token_id, file.path) == (256, path)
    assert len(left_in(cache)) == 1


def test_text_and_token_files_mix_in_the_order_given(tmp_path: Path, cache: Path):
    a, b, c = write_texts(tmp_path / "d", ["one", "two", "three"])
    np.save(tmp_path / "ids.npy", np.asarray([97, 256], np.uint16))
    files = open_corpus([a, b, tmp_path / "ids.npy", c], BYTES, cache)
    assert [texts_of(file) for file in files] == [["one", "two"], ["a"], ["three"]]


@given(
    ids=st.lists(st.integers(0, 300), min_size=1, max_size=50), chunk=st.integers(1, 20), vocab_size=st.integers(1, 310)
)
def test_check_vocabulary_names_the_first_id_outside(ids: list[int], chunk: int, vocab_size: int):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_files, "_CHUNK", chunk)
        outside = [i for i, token in enumerate(ids) if token >= vocab_size]
        tokens = np.asarray(ids, np.uint16)
        if not outside:
            assert check_vocabulary(tokens, vocab_size, "ids.npy") == max(ids)
            return
        first = outside[0]
        with pytest.raises(UserError, match=f"token id {ids[first]} at position {first} of ids.npy.* {vocab_size} ids"):
            check_vocabulary(tokens, vocab_size, "ids.npy")


def test_ids_outside_the_models_vocabulary_are_refused(tmp_path: Path, cache: Path):
    paths = write_texts(tmp_path / "d", ["abc"])
    with pytest.raises(
        UserError, match="token id 98 at position 1 of .*tokens.npy is outside the vocabulary of 98 ids"
    ):
        open_corpus(paths, BYTES, cache, vocab_size=98)
    np.save(tmp_path / "ids.npy", np.asarray([5, -1]))
    with pytest.raises(UserError, match="token id -1 at position 1 of .*ids.npy"):
        open_corpus([tmp_path / "ids.npy"], BYTES, cache)
    np.save(tmp_path / "ids.npy", np.asarray([5, 1 << 40]))
    with pytest.raises(UserError, match=f"token id {1 << 40} "):
        open_corpus([tmp_path / "ids.npy"], BYTES, cache)
    assert len(left_in(cache)) == 2  # the text and the readable index


def test_tokens_of_another_tokenizer_are_refused(tmp_path: Path, cache: Path):
    class Other(ByteTokenizer):
        name, fingerprint = "other", "other-1"

    (made,) = open_corpus(write_texts(tmp_path / "d", ["one"]), BYTES, cache)
    with pytest.raises(UserError, match=r"made by the tokenizer bytes .*this run uses other \(other-1\)"):
        open_corpus([made.path.parent], Other(), cache)


@pytest.mark.parametrize("texts", [[""], ["", ""]])
def test_an_empty_corpus_is_refused_and_leaves_nothing(tmp_path: Path, cache: Path, texts: list[str]):
    with pytest.raises(UserError, match="the corpus is empty.*000.txt"):
        open_corpus(write_texts(tmp_path / "d", texts), BYTES, cache)
    assert left_in(cache) == []


@pytest.mark.parametrize(
    ("array", "complaint"),
    [
        (np.zeros((2, 3), np.int32), "one-dimensional"),
        (np.zeros(3, np.float32), "integers"),
        (np.zeros(0, np.uint16), "holds no token"),
    ],
)
def test_arrays_that_are_no_token_ids_are_refused(tmp_path: Path, cache: Path, array: np.ndarray, complaint: str):
    np.save(tmp_path / "ids.npy", array)
    with pytest.raises(UserError, match=f"ids.npy holds no token.*{complaint}|{complaint}"):
        open_corpus([tmp_path / "ids.npy"], BYTES, cache)


def test_raw_cut_and_missing_npy_files_are_refused(tmp_path: Path, cache: Path):
    np.arange(100, dtype=np.uint32).tofile(tmp_path / "raw.npy")
    np.save(tmp_path / "cut.npy", np.arange(100, dtype=np.uint16))
    os.truncate(tmp_path / "cut.npy", 150)
    for name in ("raw", "cut"):
        with pytest.raises(UserError, match=f"{name}.npy holds no token ids .*numpy.save"):
            open_corpus([tmp_path / f"{name}.npy"], BYTES, cache)
    with pytest.raises(UserError, match="none.npy does not exist"):
        open_corpus([tmp_path / "none.npy"], BYTES, cache)


@pytest.mark.parametrize("name", ["tokens.npy", "documents.npy", META])
def test_a_damaged_entry_is_named_and_comes_back_once_deleted(tmp_path: Path, cache: Path, name: str):
    paths = write_texts(tmp_path / "d", ["one", "two"])
    (made,) = open_corpus(paths, BYTES, cache)
    damaged = made.path.parent / name
    os.truncate(damaged, damaged.stat().st_size - 8)
    with pytest.raises(UserError, match=f"{made.path.parent} is damaged"):
        open_corpus(paths, BYTES, cache)
    for file in made.path.parent.iterdir():
        if file.name != "tokens.npy" or name == "tokens.npy":  # deleted by halves, or whole
            file.unlink()
    assert texts_of(open_corpus(paths, BYTES, cache)[0]) == ["one", "two"]


def test_a_source_that_fails_half_way_leaves_nothing(tmp_path: Path, cache: Path):
    paths = write_texts(tmp_path / "d", ["one", "two"])
    paths[1].write_bytes(b"\xff")
    with pytest.raises(UserError, match="not UTF-8"):
        open_corpus(paths, BYTES, cache)
    assert left_in(cache) == []


@pytest.mark.parametrize(
    ("number", "complaint"),
    [(errno.ENOSPC, "free some space"), (errno.EDQUOT, "free some space"), (errno.EROFS, "make it writable")],
)
def test_errors_of_the_file_system_are_sentences_and_leave_nothing(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, number: int, complaint: str
):
    def fail(out):
        raise OSError(number, os.strerror(number))

    paths = write_texts(tmp_path / "d", ["one"])
    monkeypatch.setattr(token_files, "_sync", fail)
    with pytest.raises(UserError, match=f"cannot write the token cache {cache} .*{complaint}"):
        open_corpus(paths, BYTES, cache)
    assert left_in(cache) == []
    monkeypatch.undo()
    assert texts_of(open_corpus(paths, BYTES, cache)[0]) == ["one"]


def run_python(code: str, *arguments: str | Path) -> subprocess.Popen:
    root = Path(token_files.__file__).parents[2]
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(
        command,
        text=True,
        cwd=root,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": "."},
    )


def test_a_write_that_really_fails_leaves_nothing(tmp_path: Path, cache: Path):
    code = """
import resource, sys
from moejax.data.token_files import open_corpus
from moejax.data.tokenizers import ByteTokenizer
from moejax.errors import UserError
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))  # the system refuses what is written beyond
try:
    open_corpus([sys.argv[1]], ByteTokenizer(), sys.argv[2])
except UserError as error:
    print(error)
"""
    write_texts(tmp_path / "d", ["x" * 200_000])
    process = run_python(code, tmp_path / "d", cache)
    out, err = process.communicate(timeout=60)
    assert "free some space" in out, err
    assert left_in(cache) == []


def test_a_cache_folder_that_cannot_be_is_refused(tmp_path: Path):
    (tmp_path / "file").write_text("")
    for cache in (tmp_path / "file", tmp_path / "file" / "cache"):
        with pytest.raises(UserError, match="cannot write the token cache .*set another cache folder"):
            open_corpus(write_texts(tmp_path / "d", ["one"]), BYTES, cache)


def test_two_processes_at_once_make_one_entry(tmp_path: Path, cache: Path):
    code = """
import sys, time
from moejax.data.token_files import open_corpus
from moejax.data.tokenizers import ByteTokenizer
while time.time() < float(sys.argv[3]):
    time.sleep(0.001)
(file,) = open_corpus([sys.argv[1]], ByteTokenizer(), sys.argv[2])
print(file.path, file.fingerprint, len(file))
"""
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "many words"}\n' * 50_000))
    start = str(time.time() + 1.5)
    processes = [run_python(code, tmp_path / "a.jsonl.gz", cache, start) for _ in range(2)]
    results = [process.communicate(timeout=60) for process in processes]
    assert results[0][0] == results[1][0] != "", results
    assert results[0][0].split()[-1] == str(50_000 * 11)
    assert len(left_in(cache)) == 1


def test_whoever_comes_second_without_a_lock_takes_the_first_ones_entry(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
):
    @contextlib.contextmanager
    def no_lock(path):
        yield False

    paths = write_texts(tmp_path / "d", ["one", "two"])
    rivals: list[TokenFile] = []
    inodes: list[int] = []

    def read_pieces(file):
        if not rivals:  # while this process is at its first file, another one does everything
            rivals.append(None)  # type: ignore[arg-type]
            rivals[0] = open_corpus(paths, BYTES, cache)[0]
            inodes.append(rivals[0].path.stat().st_ino)
        return sources.read_pieces(file)

    monkeypatch.setattr(token_files, "_alone", no_lock)
    monkeypatch.setattr(token_files, "read_pieces", read_pieces)
    (file,) = open_corpus(paths, BYTES, cache)
    assert texts_of(file) == texts_of(rivals[0]) == ["one", "two"]
    assert [file.path.stat().st_ino] == inodes, "an entry that others may be reading was replaced"
    assert left_in(cache) == [file.path.parent.name]


def test_what_a_killed_process_left_is_swept_up_after_an_hour(tmp_path: Path, cache: Path):
    paths = write_texts(tmp_path / "d", ["one"])
    key = open_corpus(paths, BYTES, cache)[0].path.parent.name
    for file in (cache / key).iterdir():
        file.unlink()
    (cache / key).rmdir()
    for name in ("old", "new"):
        (cache / f".{key}.{name}.tmp").mkdir()
        (cache / f".{key}.{name}.tmp" / "tokens.npy").write_bytes(b"half")
    long_ago = time.time() - 7200
    for path in (cache / f".{key}.old.tmp" / "tokens.npy", cache / f".{key}.old.tmp"):
        os.utime(path, (long_ago, long_ago))
    open_corpus(paths, BYTES, cache)
    assert left_in(cache) == [f".{key}.new.tmp", key]
