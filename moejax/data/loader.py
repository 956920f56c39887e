"""Packed windows to batches: shuffled, endless, the same on any number of hosts, resumable at any batch.

    windows --shuffle by (seed, epoch)--> --repeat--> [mixed by weight] --from sequence n on--> one order of sequences
        --batches of B/hosts, of which this host takes every hosts-th--> rows [h*B/hosts, (h+1)*B/hosts) of each batch
        --made ahead by Grain's threads--> dict of int32 [B/hosts, S]

The order of sequences depends on the data, the weights and the seed, and on nothing else. The position in it is one
number, how many sequences have been handed out on all hosts together, so that a run resumes exactly, even with
another batch size or another number of hosts. Repeating comes before batching: the windows at the end of an epoch
that fill no batch share one with the first of the next epoch, and a corpus smaller than a batch just repeats in it.
"""

import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Self

import grain
import numpy as np

from moejax.data.packing import IGNORED_LABEL, Batch, PackedWindows
from moejax.errors import UserError

_WEIGHT_RESOLUTION = 1_000_000
_SMALL = 1 << 14


class Position(NamedTuple):
    """Where a loader stands in one of its sources: `window` windows into epoch `epoch` (from 0), of `windows`."""

    epoch: int
    window: int
    windows: int


class Mixture(grain.transforms.DatasetSelectionMap):
    """Which source gives sequence k, and which of its sequences that is: an even interleaving by weight.

    Among the first k sequences, source i has `counts(k)[i]`, which is within one per source of k * w_i / sum(w), so
    that every batch has nearly the proportions asked for. This is Grain's own rule; it is spelled out since Grain's
    `mix` rounds weights to whole multiples of 1% of the smallest and cannot say how far each source has been read.
    """

    def __init__(self, weights: Sequence[float]):
        total = sum(weights)
        self._shares = [max(1, round(weight / total * _WEIGHT_RESOLUTION)) for weight in weights]

    def counts(self, sequences: int) -> list[int]:
        """How many of the first `sequences` come from each source; the sum is `sequences`."""
        counts, left, shares_left = [], sequences, sum(self._shares)
        for share in self._shares:
            after = left * (shares_left - share) // shares_left
            counts.append(left - after)
            left, shares_left = after, shares_left - share
        return counts

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, index: int) -> tuple[int, int]:
        before, after = self.counts(index), self.counts(index + 1)
        source = next(i for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b)
        return source, before[source]


class SmallShuffle(grain.transforms.DatasetSelectionMap):
    """The shuffle of a source of at most `_SMALL` windows: a new permutation for every epoch, held in memory.

    Grain's own shuffle holds nothing and suits any size, but finds its place in a small source by walking through
    many indices beyond it: 13 ms a window for a source of 2, 0.5 ms for 100, 0.01 ms from 10,000 on (measured 2026-11).
    """

    def __init__(self, length: int, seed: int):
        self._length, self._seed = length, seed
        self._latest = (-1, np.arange(0))

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[int, int]:
        epoch, place = divmod(index, self._length)
        of_epoch, permutation = self._latest  # read and set as one: a thread that was just told to stop may be in here
        if of_epoch != epoch:
            # RandomState, since NumPy promises the same numbers in every version of it, and not of Generator.
            state = np.random.RandomState(np.random.MT19937(np.random.SeedSequence([self._seed, epoch])))
            permutation = state.permutation(self._length)
            self._latest = (epoch, permutation)
        return 0, epoch * self._length + int(permutation[place])


class Loader(Iterator[Batch]):
    """Endless batches of this host: dicts of int32 [global_batch_size / host_count, S], see `packing.pack`.

    windows: one source or several; weights: share of the sequences each source gives (default: in proportion to
    their sizes, so that epochs end together). seed: any integer >= 0. shuffle=False keeps the order of the corpus.
    prefetch: batches made ahead in a background thread, 0 for none; it changes no batch and no state.

    `get_state` is taken between batches and is a small dict that JSON can hold, the same on every host; `set_state`
    continues with exactly the batches that would have followed. Use as a context manager, or call `close`, to stop
    the thread at once; a loader that is dropped stops it as well.

    Raises UserError: no source, sources of different lengths, a weight that is not above 0, a batch that does not
    divide over the hosts, a negative seed.
    """

    def __init__(
        self,
        windows: PackedWindows | Sequence[PackedWindows],
        *,
        global_batch_size: int,
        seed: int,
        weights: Sequence[float] | None = None,
        host_index: int = 0,
        host_count: int = 1,
        shuffle: bool = True,
        prefetch: int = 4,
    ):
        self._sources = [windows] if isinstance(windows, PackedWindows) else list(windows)
        if not self._sources:
            raise UserError("there is no data: give data.paths some text.")
        if len({source.sequence_length for source in self._sources}) > 1:
            raise UserError("the sources of data.mixture differ in sequence_length: it must be the same for all.")
        self._weights = [float(len(s)) for s in self._sources] if weights is None else [float(w) for w in weights]
        if len(self._weights) != len(self._sources) or not all(0 < w < float("inf") for w in self._weights):
            raise UserError(
                f"data.mixture has the weights {self._weights} for {len(self._sources)} sources: "
                "each source needs one, above 0 (leave a source out to give it none)."
            )
        if seed < 0:
            raise UserError(f"data.seed is {seed}: it must be 0 or more.")
        self.global_batch_size = global_batch_size
        self._seed, self._shuffle, self._prefetch = seed, shuffle, prefetch
        self._host_index, self._host_count = host_index, host_count
        _rows(global_batch_size, host_index, host_count)
        self._mixture = Mixture(self._weights)
        self._order = self._endless_order()
        self._start_at(0)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        batch = next(self._batches)
        self._sequences += self.global_batch_size
        return batch

    @property
    def sequences(self) -> int:
        """Sequences handed out so far, on all hosts together."""
        return self._sequences

    @property
    def positions(self) -> list[Position]:
        """Where each source stands: the epoch and the window within it that come next."""
        counts = self._mixture.counts(self._sequences)
        return [
            Position(*divmod(count, len(source)), len(source))
            for count, source in zip(counts, self._sources, strict=True)
        ]

    @property
    def epoch(self) -> int:
        """Whole epochs behind us, of the source that has been read least often."""
        return min(position.epoch for position in self.positions)

    def get_state(self) -> dict[str, Any]:
        """The position, and what the order of sequences depends on; JSON can hold it."""
        return {"sequences": self._sequences, **self._identity()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues where `state` was taken. Raises UserError: it was taken over other data, which it names."""
        here = self._identity()
        changed = [name for name, value in here.items() if state.get(name) != value]
        sequences = state.get("sequences")
        if changed or not isinstance(sequences, int) or sequences < 0:
            what = ", ".join(f"{name} (was {state.get(name)}, is {here[name]})" for name in changed) or "its position"
            raise UserError(
                f"the saved data position does not fit the data of this run: {what}; "
                "restore the data and its settings, or start a new run."
            )
        self._start_at(sequences)

    def close(self) -> None:
        """Stops the background thread; the loader gives no batch afterwards."""
        self._batches.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _identity(self) -> dict[str, Any]:
        return {
            "seed": self._seed,
            "shuffle": self._shuffle,
            "weights": self._weights,
            "data": [source.fingerprint for source in self._sources],
        }

    def _endless_order(self) -> grain.MapDataset:
        sources = []
        for number, source in enumerate(self._sources):
            dataset = grain.MapDataset.source(source)
            if self._shuffle:
                # Grain shuffles epoch e by seed + e. Hashed first, since otherwise the second epoch of seed 0 would be
                # the first of seed 1, and all sources of a mixture would be shuffled alike.
                seed = int(np.random.SeedSequence([self._seed, number]).generate_state(1)[0])
                if len(source) > _SMALL:
                    dataset = dataset.shuffle(seed=seed)
                else:
                    dataset = grain.MapDataset.select_from_datasets([dataset], SmallShuffle(len(source), seed))
            sources.append(dataset.repeat())
        return sources[0] if len(sources) == 1 else grain.MapDataset.select_from_datasets(sources, self._mixture)

    def _start_at(self, sequences: int) -> None:
        if hasattr(self, "_batches"):
            self._batches.close()
        rows = self.global_batch_size // self._host_count
        batches = self._order[sequences:].batch(rows, drop_remainder=True)[self._host_index :: self._host_count]
        read_options = grain.ReadOptions(num_threads=min(1, self._prefetch), prefetch_buffer_size=self._prefetch)
        self._batches = iter(batches.to_iter_dataset(read_options))
        self._sequences = sequences


def one_pass(
    windows: PackedWindows, *, global_batch_size: int, host_index: int = 0, host_count: int = 1
) -> Iterator[Batch]:
    """Every window exactly once, in order, for evaluation; batches as `Loader` gives them, ceil(n / B) of them.

    The last batch is filled up with windows whose labels are all IGNORED_LABEL: shapes never change, and no window is
    counted twice. Raises UserError: a batch that does not divide over the hosts.
    """
    first, last = _rows(global_batch_size, host_index, host_count)

    def batches() -> Iterator[Batch]:
        for start in range(0, len(windows), global_batch_size):
            rows = []
            for index in range(start + first, start + last):
                sample = windows[index % len(windows)]
                if index >= len(windows):
                    sample["labels"] = np.full_like(sample["labels"], IGNORED_LABEL)
                rows.append(sample)
            yield {name: np.stack([row[name] for row in rows]) for name in rows[0]}

    return batches()


def _rows(global_batch_size: int, host_index: int, host_count: int) -> tuple[int, int]:
    """The rows [first, last) of each global batch that this host makes. Raises UserError: they do not divide."""
    if global_batch_size < 1 or global_batch_size % host_count:
        raise UserError(
            f"a batch of {global_batch_size} sequences does not divide over {host_count} hosts: "
            "choose a train.batch_tokens that is a multiple of hosts x sequence_length."
        )
    if not 0 <= host_index < host_count:
        raise UserError(f"host {host_index} of {host_count} does not exist: hosts are numbered from 0.")
    rows = global_batch_size // host_count
    return host_index * rows, (host_index + 1) * rows
