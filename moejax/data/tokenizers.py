"""Text to token ids and back: bytes, built in, or any Hugging Face `tokenizer.json`.

    str --encode_batch--> one int32 array of ids per text (no end-of-document id: `token_files` adds it)
    ids --decode--> str

Ids mean text alone: text that happens to spell a special token ("<|endoftext|>" in a web page) is encoded as the
ordinary characters it is, so that no document can end another one.
"""

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from moejax.errors import UserError

END_OF_DOCUMENT_NAMES = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<|eos|>",
    "<EOS>",
    "[EOS]",
    "<|end_of_document|>",
    "<｜end▁of▁sentence｜>",
)
"""What published tokenizers call the token between documents, the commonest name first."""


class Tokenizer(Protocol):
    """What the data pipeline asks of a tokenizer.

    name: as given to `load_tokenizer`. vocab_size: largest id + 1. end_of_document_id: the id between documents.
    fingerprint: equal for tokenizers that give equal ids; part of the key of every cached token file.
    """

    name: str
    vocab_size: int
    end_of_document_id: int
    fingerprint: str

    def encode(self, text: str) -> np.ndarray:
        """int32[n], the ids of `text`, without any special token."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """`encode` of every text, in parallel where the tokenizer can."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`; special tokens are left out, broken UTF-8 becomes U+FFFD."""
        ...


class ByteTokenizer:
    """Ids 0..255 are the bytes of the UTF-8 text, 256 ends a document."""

    name = "bytes"
    vocab_size = 257
    end_of_document_id = 256
    fingerprint = "bytes-257"

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int32)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(i for i in map(int, ids) if 0 <= i < 256).decode("utf-8", errors="replace")


class HuggingFaceTokenizer:
    """A `tokenizer.json`, read by the package `tokenizers`.

    Its own truncation, padding and template (BOS, EOS) are switched off: a corpus is encoded whole, and
    `token_files` alone decides where documents end.

    Raises UserError: the file is missing or is no tokenizer, or has no token with a name in `END_OF_DOCUMENT_NAMES`.
    """

    def __init__(self, name: str):
        import tokenizers

        path = Path(name).expanduser()
        path = path / "tokenizer.json" if path.is_dir() else path
        try:
            content = path.read_bytes()
        except OSError as error:
            raise UserError(
                f'tokenizer "{name}": cannot read {path} ({error.strerror}); '
                'give "bytes" or the path of a tokenizer.json.'
            ) from error
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(content)
        except Exception as error:  # the package raises bare Exception and ValueError for whatever serde rejects
            raise UserError(f"tokenizer {path} is not a Hugging Face tokenizer.json ({error}).") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        ends = [vocabulary[end] for end in END_OF_DOCUMENT_NAMES if end in vocabulary]
        if not ends:
            raise UserError(
                f"tokenizer {path} has no end-of-document token: none of {', '.join(END_OF_DOCUMENT_NAMES)} is in its "
                "vocabulary; add one of them to its added_tokens."
            )
        self.name = name
        # get_vocab_size() counts the entries; ids may have holes, and then the largest id lies beyond the count.
        self.vocab_size = max(vocabulary.values()) + 1
        self.end_of_document_id = ends[0]
        self.fingerprint = "hf-" + hashlib.sha256(content).hexdigest()[:32]

    def encode(self, text: str) -> np.ndarray:
        return np.asarray(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int32)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(encoding.ids, np.int32) for encoding in encodings]

    def decode(self, ids: Iterable[int]) -> str:
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=True)


def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer called `name`: "bytes", or the path of a `tokenizer.json` or of the folder that holds one.

    Raises UserError: no such file, not a tokenizer, or no end-of-document token in it.
    """
    return ByteTokenizer() if name == "bytes" else HuggingFaceTokenizer(name)
