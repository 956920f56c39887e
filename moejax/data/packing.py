"""Token files to training samples of one fixed length.

    ... d o c A <end> d o c B <end> d o c ...      one long row of ids
        |--- window 0, S+1 ids ---|
                              |--- window 1 ---    windows share one id, so that every id but the first is a label once
    window --pack--> tokens_S, labels_S, segment_ids_S, positions_S

Windows are cut without regard to documents; where a window holds several, `segment_ids` keeps attention apart and
`positions` starts anew, and the last id of a document is not asked to foretell the next one.
Held-out text is the windows at the end, a fixed fraction of them.
"""

import hashlib
import os
from collections.abc import Sequence
from typing import Literal

import numpy as np

from moejax.data.token_files import TokenFile
from moejax.errors import UserError

IGNORED_LABEL = -100
"""The label of a position that has none: it counts in no loss and in no statistic."""

Split = Literal["train", "validation"]
Batch = dict[str, np.ndarray]
"""tokens, labels, segment_ids, positions: int32 [..., S] each."""


def pack(windows: np.ndarray, end_of_document_id: int) -> Batch:
    """Samples of `windows`, integers [..., S+1]; all results int32 [..., S].

    tokens[s] = window[s]; labels[s] = window[s+1], but IGNORED_LABEL where window[s] ends a document;
    segment_ids[s] = how many documents ended before s in this window; positions[s] = how far s is from the start of
    its document, or of the window if the document began before it.
    """
    tokens = np.ascontiguousarray(windows[..., :-1], np.int32)
    ends = tokens == end_of_document_id
    labels = np.where(ends, np.int32(IGNORED_LABEL), windows[..., 1:]).astype(np.int32)
    starts = np.zeros_like(ends)
    starts[..., 1:] = ends[..., :-1]
    index = np.arange(tokens.shape[-1], dtype=np.int32)
    positions = index - np.maximum.accumulate(np.where(starts, index, np.int32(0)), axis=-1)
    return {
        "tokens": tokens,
        "labels": labels,
        "segment_ids": np.cumsum(starts, axis=-1, dtype=np.int32),
        "positions": positions,
    }


def window_count(tokens: int, sequence_length: int) -> int:
    """How many windows of S+1 ids, S apart, fit in so many tokens: max(0, (tokens - 1) // S)."""
    return max(0, (tokens - 1) // sequence_length)


class PackedWindows:
    """The samples of a corpus, by number: `windows[i]` is the `Batch` of window i, without a batch axis.

    Each file is cut by itself; the up to S ids at its end that fill no window are left out. Of the n windows of all
    files, round(validation_fraction * n) at the end are held out for the split "validation" (at least one if the
    fraction is above 0 and n is 2 or more), the others are the split "train".

    fingerprint: equal exactly where all samples are equal (ids, length, split).
    Raises UserError: fewer tokens than one window, an empty split, a fraction outside [0, 1).
    """

    def __init__(
        self,
        corpus: Sequence[TokenFile],
        sequence_length: int,
        *,
        split: Split = "train",
        validation_fraction: float = 0.0,
    ):
        if sequence_length < 1:
            raise UserError(f"data.sequence_length is {sequence_length}: it must be 1 or more.")
        if not 0.0 <= validation_fraction < 1.0:
            raise UserError(f"the held-out fraction is {validation_fraction}: it must be at least 0 and below 1.")
        self.sequence_length = sequence_length
        self._corpus = list(corpus)
        self._first_windows = np.cumsum([0, *(window_count(len(file), sequence_length) for file in self._corpus)])
        total = int(self._first_windows[-1])
        if not total:
            tokens = sum(len(file) for file in self._corpus)
            raise UserError(
                f"the corpus is too short: {tokens} tokens where one window needs data.sequence_length + 1 = "
                f"{sequence_length + 1}; give it more text or a shorter sequence_length."
            )
        held_out = min(max(1, round(validation_fraction * total)), total - 1) if validation_fraction else 0
        bounds = {"train": (0, total - held_out), "validation": (total - held_out, total)}
        if split not in bounds:
            raise UserError(f'there is no split "{split}": it is "train" or "validation".')
        self._start, self._stop = bounds[split]
        if self._start == self._stop:
            raise UserError(
                f'the split "{split}" is empty: {total} windows, held-out fraction {validation_fraction}; '
                "give the corpus more text, or hold out a fraction above 0."
            )
        parts = [f"{sequence_length} {self._start} {self._stop}"]
        parts += [f"{file.fingerprint} {file.end_of_document_id}" for file in self._corpus]
        self.fingerprint = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]

    def __len__(self) -> int:
        return self._stop - self._start

    def __getitem__(self, index: int) -> Batch:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        window = self._start + index
        which = int(np.searchsorted(self._first_windows, window, side="right")) - 1
        file = self._corpus[which]
        start = (window - int(self._first_windows[which])) * self.sequence_length
        return pack(file.tokens[start : start + self.sequence_length + 1], file.end_of_document_id)

    def __repr__(self) -> str:
        names = ", ".join(os.fspath(file.path) for file in self._corpus)
        return f"PackedWindows({len(self)} x {self.sequence_length} of {names})"
