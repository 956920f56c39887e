"""Packing: every token in its place, every label the next token of the same document, held-out text apart."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moejax.data.packing import IGNORED_LABEL, PackedWindows, pack, window_count
from moejax.errors import UserError
from tests.data.corpora import END, token_file

LENGTHS = st.lists(st.integers(0, 12), min_size=1, max_size=10)


def pack_slowly(window: list[int]) -> dict[str, list[int]]:
    """The definition, token by token."""
    tokens, labels, segments, positions = [], [], [], []
    segment = position = 0
    for token, following in zip(window[:-1], window[1:], strict=True):
        tokens.append(token)
        labels.append(IGNORED_LABEL if token == END else following)
        segments.append(segment)
        positions.append(position)
        position += 1
        if token == END:
            segment, position = segment + 1, 0
    return {"tokens": tokens, "labels": labels, "segment_ids": segments, "positions": positions}


@given(window=st.lists(st.sampled_from([END, END + 1, END + 2, 7]), min_size=2, max_size=30))
def test_pack_is_its_definition(window: list[int]):
    sample = pack(np.asarray(window, np.uint16), END)
    for name, expected in pack_slowly(window).items():
        assert sample[name].dtype == np.int32
        assert sample[name].tolist() == expected, name


def test_pack_takes_leading_axes():
    windows = np.random.default_rng(0).choice([END, 1, 2], size=(3, 4, 9))
    together = pack(windows, END)
    for i in np.ndindex(3, 4):
        for name, array in pack(windows[i], END).items():
            np.testing.assert_array_equal(together[name][i], array)


@given(lengths=LENGTHS, sequence_length=st.integers(1, 9))
def test_windows_hold_every_token_once_and_in_order(lengths: list[int], sequence_length: int):
    file = token_file(lengths)
    count = window_count(len(file), sequence_length)
    if not count:
        with pytest.raises(UserError, match="too short"):
            PackedWindows([file], sequence_length)
        return
    windows = PackedWindows([file], sequence_length)
    assert len(windows) == count and len(file) - count * sequence_length in range(1, sequence_length + 1)
    samples = [windows[i] for i in range(count)]
    tokens = np.concatenate([sample["tokens"] for sample in samples])
    labels = np.concatenate([sample["labels"] for sample in samples])
    np.testing.assert_array_equal(tokens, file.tokens[: len(tokens)])
    # Across the edges of windows too, the label is the next token of the corpus, or none after the end of a document.
    following = np.where(tokens == END, IGNORED_LABEL, file.tokens[1 : len(tokens) + 1].astype(np.int64))
    np.testing.assert_array_equal(labels, following)


@given(lengths=LENGTHS, sequence_length=st.integers(1, 9))
def test_a_segment_is_one_document_and_positions_count_within_it(lengths: list[int], sequence_length: int):
    file = token_file(lengths)
    if not window_count(len(file), sequence_length):
        return
    document = np.repeat(np.arange(len(lengths)), np.diff(file.document_starts))  # of each token
    windows = PackedWindows([file], sequence_length)
    for i in range(len(windows)):
        sample = windows[i]
        of_document = document[i * sequence_length : (i + 1) * sequence_length]
        np.testing.assert_array_equal(sample["segment_ids"], of_document - of_document[0])
        for segment in np.unique(sample["segment_ids"]):
            inside = sample["positions"][sample["segment_ids"] == segment]
            np.testing.assert_array_equal(inside, np.arange(len(inside)))


def test_several_files_are_cut_each_by_itself():
    files = [token_file([6]), token_file([20]), token_file([1]), token_file([9])]
    windows = PackedWindows(files, 4)
    expected = [
        file.tokens[i * 4 : i * 4 + 4] for file in files for i in range((len(file) - 1) // 4)
    ]  # the third file is shorter than a window
    assert len(windows) == len(expected) == 1 + 5 + 0 + 2
    for i, tokens in enumerate(expected):
        np.testing.assert_array_equal(windows[i]["tokens"], tokens)


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=4),
    sequence_length=st.integers(1, 4),
    fraction=st.floats(0, 0.999),
)
def test_the_splits_are_the_whole_without_overlap(lengths: list[int], sequence_length: int, fraction: float):
    files = [token_file([length]) for length in lengths]
    if sum(window_count(len(file), sequence_length) for file in files) < 2:
        return
    whole = PackedWindows(files, sequence_length)
    train = PackedWindows(files, sequence_length, validation_fraction=fraction)
    parts = [train]
    if fraction > 0:
        parts.append(PackedWindows(files, sequence_length, split="validation", validation_fraction=fraction))
        assert abs(len(parts[1]) - fraction * len(whole)) <= 1
    assert sum(map(len, parts)) == len(whole)
    samples = [part[i] for part in parts for i in range(len(part))]
    for i, sample in enumerate(samples):
        np.testing.assert_array_equal(sample["tokens"], whole[i]["tokens"])


def test_fingerprints_differ_exactly_where_samples_do():
    file, same, other = token_file([30]), token_file([30]), token_file([29, 0])
    first = PackedWindows([file], 4).fingerprint
    assert first == PackedWindows([same], 4).fingerprint
    others = [
        PackedWindows([other], 4),
        PackedWindows([file], 5),
        PackedWindows([file, same], 4),
        PackedWindows([file], 4, validation_fraction=0.3),
        PackedWindows([file], 4, validation_fraction=0.3, split="validation"),
    ]
    assert len({first, *(windows.fingerprint for windows in others)}) == 1 + len(others)


def test_an_index_outside_is_an_index_error():
    windows = PackedWindows([token_file([10])], 4)
    for index in (len(windows), -1):
        with pytest.raises(IndexError):
            windows[index]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"sequence_length": 100}, "too short: 11 tokens where one window needs .* 101"),
        ({"sequence_length": 0}, "sequence_length is 0"),
        ({"sequence_length": 4, "validation_fraction": 1.0}, "held-out fraction is 1.0"),
        ({"sequence_length": 4, "validation_fraction": -0.1}, "held-out fraction is -0.1"),
        ({"sequence_length": 4, "split": "validation"}, 'split "validation" is empty'),
        ({"sequence_length": 10, "split": "validation", "validation_fraction": 0.5}, 'split "validation" is empty'),
        ({"sequence_length": 4, "split": "test"}, 'no split "test"'),
    ],
)
def test_bad_settings_are_sentences(arguments: dict, complaint: str):
    with pytest.raises(UserError, match=complaint):
        PackedWindows([token_file([10])], **arguments)
