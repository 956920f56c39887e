"""Small corpora, built in the test that uses them."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from moejax.data.token_files import TokenFile

END = 256


def token_file(document_lengths: Sequence[int], first_id: int = END + 1) -> TokenFile:
    """Documents of the given lengths (without their end), whose ids count up from `first_id`, above END.

    Every id thus tells where it stands, and no stretch of tokens is like another.
    """
    parts, starts, next_id = [], [0], first_id
    for length in document_lengths:
        parts += [np.arange(next_id, next_id + length), [END]]
        next_id += length
        starts.append(starts[-1] + length + 1)
    tokens = np.concatenate(parts).astype(np.uint32)
    digest = hashlib.sha256(tokens.tobytes()).hexdigest()
    return TokenFile(Path("in-memory.npy"), tokens, np.asarray(starts), END, int(tokens.max()), None, digest)
