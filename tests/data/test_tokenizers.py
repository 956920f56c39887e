"""Bytes and Hugging Face files: round trips, ends of documents, and the sentences for files that are neither."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from moejax.data.tokenizers import END_OF_DOCUMENT_NAMES, load_tokenizer
from moejax.errors import UserError

TEXT = st.text(st.characters(exclude_categories=["Cs"]))


def train_bpe(path: Path, special_tokens: list[str]) -> Tokenizer:
    """A byte-level BPE with a few merges, saved at `path`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=280, special_tokens=special_tokens, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["hello world, hello words"] * 8, trainer)
    tokenizer.save(str(path))
    return tokenizer


@pytest.fixture(scope="module")
def bpe_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    train_bpe(path, ["<pad>", "<|endoftext|>"])
    return path


@given(text=TEXT)
def test_bytes_round_trip_and_are_the_utf8_bytes(text: str):
    tokenizer = load_tokenizer("bytes")
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32
    assert bytes(ids.tolist()) == text.encode("utf-8")
    assert tokenizer.decode([*ids, tokenizer.end_of_document_id]) == text


def test_bytes_vocabulary_is_the_bytes_and_the_end_of_a_document():
    tokenizer = load_tokenizer("bytes")
    assert (tokenizer.vocab_size, tokenizer.end_of_document_id) == (257, 256)


@given(text=TEXT)
def test_hugging_face_round_trip(bpe_path: Path, text: str):
    tokenizer = load_tokenizer(str(bpe_path))
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32
    assert ids.size == 0 or 0 <= ids.min() <= ids.max() < tokenizer.vocab_size
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("name", ["bytes", "bpe"])
def test_encode_batch_is_encode_of_each(bpe_path: Path, name: str):
    tokenizer = load_tokenizer("bytes" if name == "bytes" else str(bpe_path))
    texts = ["hello world", "", "é\n漢", "<|endoftext|>"]
    for ids, text in zip(tokenizer.encode_batch(texts), texts, strict=True):
        np.testing.assert_array_equal(ids, tokenizer.encode(text))


def test_text_that_spells_a_special_token_does_not_become_one(bpe_path: Path):
    tokenizer = load_tokenizer(str(bpe_path))
    text = "before<|endoftext|>after"
    for ids in (tokenizer.encode(text), tokenizer.encode_batch([text])[0]):
        assert tokenizer.end_of_document_id not in ids
        assert tokenizer.decode(ids) == text


def test_merges_are_used(bpe_path: Path):
    assert len(load_tokenizer(str(bpe_path)).encode("hello world")) < len("hello world")


@pytest.mark.parametrize("end", END_OF_DOCUMENT_NAMES)
def test_end_of_document_is_found_by_its_usual_names(tmp_path: Path, end: str):
    path = tmp_path / "tokenizer.json"
    expected = train_bpe(path, ["<unk>", end]).token_to_id(end)
    tokenizer = load_tokenizer(str(tmp_path))  # the folder will do
    assert tokenizer.end_of_document_id == expected
    assert tokenizer.decode([expected]) == ""


def test_truncation_padding_and_template_of_the_file_are_switched_off(tmp_path: Path, bpe_path: Path):
    tokenizer = Tokenizer.from_file(str(bpe_path))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    end = tokenizer.token_to_id("<|endoftext|>")
    tokenizer.post_processor = processors.TemplateProcessing(
        "<|endoftext|> $A", special_tokens=[("<|endoftext|>", end)]
    )
    tokenizer.save(str(tmp_path / "odd.json"))
    text = "one two three four five six"
    plain, odd = load_tokenizer(str(bpe_path)), load_tokenizer(str(tmp_path / "odd.json"))
    np.testing.assert_array_equal(odd.encode(text), plain.encode(text))
    assert odd.fingerprint != plain.fingerprint


def test_vocab_size_covers_ids_beyond_a_hole(tmp_path: Path, bpe_path: Path):
    content = json.loads(bpe_path.read_text("utf-8"))
    vocabulary = content["model"]["vocab"]
    del vocabulary["!"], vocabulary['"']  # two ids that nothing has any more
    largest = max(vocabulary.values())
    (tmp_path / "tokenizer.json").write_text(json.dumps(content), "utf-8")
    assert load_tokenizer(str(tmp_path)).vocab_size == largest + 1


def test_no_such_file_says_what_a_tokenizer_may_be(tmp_path: Path):
    with pytest.raises(UserError, match=r'gpt2.*give "bytes" or the path of a tokenizer\.json'):
        load_tokenizer("gpt2")
    with pytest.raises(UserError, match="cannot read .*tokenizer.json"):
        load_tokenizer(str(tmp_path))


def test_a_file_that_is_no_tokenizer_is_named(tmp_path: Path):
    path = tmp_path / "tokenizer.json"
    path.write_text('{"hello": 1}')
    with pytest.raises(UserError, match=r"tokenizer\.json is not a Hugging Face tokenizer\.json"):
        load_tokenizer(str(path))


def test_a_tokenizer_without_an_end_of_document_is_refused(tmp_path: Path):
    path = tmp_path / "tokenizer.json"
    train_bpe(path, ["<unk>"])
    with pytest.raises(UserError, match="no end-of-document token"):
        load_tokenizer(str(path))
