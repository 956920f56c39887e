"""What the paths stand for, in which order, and what is said of files that cannot be read as text."""

import gzip
import json
import os
import sysconfig
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moejax.data import sources
from moejax.data.sources import find_files, read_pieces, standard_library_files
from moejax.errors import UserError


def documents(path: Path) -> list[str]:
    """The documents of a file, put together again from their pieces."""
    found, parts = [], []
    for piece in read_pieces(path):
        assert piece.text
        parts.append(piece.text)
        if piece.ends_document:
            found.append("".join(parts))
            parts = []
    assert not parts, "the last document has no end"
    return found


def write_jsonl(path: Path, texts: list[str]) -> Path:
    data = "".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(texts)).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


@given(text=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=200), size=st.integers(1, 30))
def test_a_text_file_is_one_document_however_it_is_cut(tmp_path_factory: pytest.TempPathFactory, text: str, size: int):
    path = tmp_path_factory.mktemp("text") / "a.txt"
    path.write_bytes(text.encode("utf-8"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "PIECE_CHARACTERS", size)
        assert documents(path) == [text.removeprefix("\ufeff")] * (text != "\ufeff")
        assert max((len(piece.text) for piece in read_pieces(path)), default=0) <= size


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json.gz"])
def test_each_line_of_jsonl_is_a_document_however_it_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    monkeypatch.setattr(sources, "PIECE_CHARACTERS", 8)
    texts = ["one", "two\nlines\r\n", "漢字 é", "a long line of more than one piece\nand another\n"]
    path = write_jsonl(tmp_path / name, texts)
    assert documents(path) == texts


def test_pieces_end_after_a_line_where_there_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sources, "PIECE_CHARACTERS", 10)
    path = tmp_path / "a.txt"
    path.write_text("abc\ndef\nghi\njkl\nmno")
    assert [piece.text for piece in read_pieces(path)] == ["abc\ndef\n", "ghi\njkl\n", "mno"]


def test_empty_documents_and_blank_lines_are_left_out(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_text('\n{"text": ""}\n{"text": "x"}\n   \n')
    assert documents(path) == ["x"]
    (tmp_path / "empty.txt").write_text("")
    assert documents(tmp_path / "empty.txt") == []


def test_line_ends_stay_and_a_byte_order_mark_goes(tmp_path: Path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\ntwo\rthree\n")
    assert documents(path) == ["one\r\ntwo\rthree\n"]


def test_half_a_surrogate_pair_in_json_becomes_a_replacement_character(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a\\ud800b \\ud83d\\ude00"}')
    assert documents(path) == ["a\ufffdb 😀"]


def test_folders_are_searched_in_a_fixed_order_for_text_only(tmp_path: Path):
    for name in ["b/z.py", "b/a.md", "a.txt", "B.txt", "c/d/e.jsonl.gz", "c/picture.png", ".git/x.txt", ".hidden.txt",
                 "__pycache__/m.py"]:  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    found = [file.relative_to(tmp_path).as_posix() for file in find_files([tmp_path])]
    assert found == ["B.txt", "a.txt", "b/a.md", "b/z.py", "c/d/e.jsonl.gz"]


def test_entries_keep_their_order_and_no_file_comes_twice(tmp_path: Path):
    for name in ["a.txt", "b.txt", "c.txt"]:
        (tmp_path / name).write_text(name)
    os.symlink(tmp_path / "a.txt", tmp_path / "link.txt")
    found = [file.name for file in find_files([tmp_path / "b.txt", tmp_path, tmp_path / "c.txt"])]
    assert found == ["b.txt", "a.txt", "c.txt"]


def test_a_link_back_up_the_tree_ends_the_search(tmp_path: Path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.txt").write_text("x")
    for name in ("up", "up too"):  # two of them: 2^40 roads before the system says no
        os.symlink(tmp_path, tmp_path / "a" / name)
    assert [file.name for file in find_files([tmp_path])] == ["x.txt"]


def test_patterns_are_expanded_and_sorted(tmp_path: Path):
    for name in ["2.jsonl", "1.jsonl", "3.txt"]:
        (tmp_path / name).write_text("{}")
    assert [file.name for file in find_files([str(tmp_path / "*.jsonl")])] == ["1.jsonl", "2.jsonl"]


def test_a_file_named_by_itself_is_read_whatever_its_suffix(tmp_path: Path):
    path = tmp_path / "LICENSE"
    path.write_text("words")
    assert find_files([path]) == [path]
    assert documents(path) == ["words"]


def test_the_default_is_the_standard_library_the_same_every_time():
    files = find_files([])
    root = Path(sysconfig.get_path("stdlib"))
    relative = [file.relative_to(root) for file in files]
    assert files == standard_library_files()
    assert [file.as_posix() for file in relative] == sorted(file.as_posix() for file in relative)
    assert {"argparse.py", "json/decoder.py"} <= {file.as_posix() for file in relative}
    assert not {"site-packages", "test", "tests", "__pycache__"} & {part for file in relative for part in file.parts}
    for file in files:
        file.read_text("utf-8")


@pytest.mark.parametrize("path", ["nowhere.txt", "no/such/folder", "none-*.txt"])
def test_a_missing_path_is_named(tmp_path: Path, path: str):
    with pytest.raises(UserError, match=f"{path.replace('*', '.')} does not exist.*check data.paths"):
        find_files([tmp_path / path])


def test_a_folder_without_text_says_what_it_looked_for(tmp_path: Path):
    (tmp_path / "picture.png").write_bytes(b"x")
    with pytest.raises(UserError, match=r"holds no text.*\.jsonl"):
        find_files([tmp_path])


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{'text': 1}", "line 2 is not JSON"),
        ('{"text": "cut', "line 2 is not JSON"),
        ('{"text": 1' + "0" * 5000 + "}", "line 2 is not JSON"),
        ("[" * 100_000, "line 2 is not JSON"),
        ('{"words": "x"}', 'line 2 has no "text"'),
        ('{"text": null}', 'line 2 has no "text"'),
        ('["text"]', 'line 2 has no "text"'),
    ],
)
def test_a_bad_line_is_named_with_its_file(tmp_path: Path, line: str, complaint: str):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(UserError, match=f"a.jsonl, {complaint}"):
        documents(path)


@pytest.mark.parametrize("piece", [4, 1 << 20])
def test_the_place_where_a_file_stops_being_utf8_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int):
    monkeypatch.setattr(sources, "PIECE_CHARACTERS", piece)
    path = tmp_path / "latin.txt"
    path.write_bytes("a漢b".encode() + "café".encode("latin-1") + b" noir")
    with pytest.raises(UserError, match=r"latin.txt is not UTF-8 text \(byte 0xe9 at offset 8\)"):
        documents(path)


def test_a_file_that_ends_within_a_character_is_not_utf8(tmp_path: Path):
    path = tmp_path / "cut.txt"
    path.write_bytes("abé".encode()[:-1])
    with pytest.raises(UserError, match=r"byte 0xc3 at offset 2"):
        documents(path)


def test_utf16_is_recognised(tmp_path: Path):
    path = tmp_path / "wide.txt"
    path.write_bytes("hello".encode("utf-16"))
    with pytest.raises(UserError, match="begins like UTF-16"):
        documents(path)


def test_a_line_that_is_not_utf8_is_named(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "x"}\n{"text": "caf\xe9"}\n')
    with pytest.raises(UserError, match=r"a.jsonl, line 2 is not UTF-8 text \(byte 0xe9"):
        documents(path)


def test_damaged_gzip_is_named(tmp_path: Path):
    whole = write_jsonl(tmp_path / "a.jsonl.gz", ["words " * 1000]).read_bytes()
    for name, data in {"cut": whole[:-20], "plain": b'{"text": "x"}\n', "changed": whole[:30] + b"\xff" * 20}.items():
        path = tmp_path / f"{name}.jsonl.gz"
        path.write_bytes(data)
        with pytest.raises(UserError, match=f"{name}.jsonl.gz is damaged or not gzip"):
            documents(path)
