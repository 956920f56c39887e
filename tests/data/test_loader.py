"""The loader: each epoch a permutation, the same batches on any number of hosts, after any interruption."""

import itertools
import json
import threading
import time
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moejax.data.loader import Loader, Mixture, one_pass
from moejax.data.packing import IGNORED_LABEL, Batch, PackedWindows
from moejax.errors import UserError
from tests.data.corpora import token_file

S = 4


def windows_of(count: int, corpus: int = 0) -> PackedWindows:
    """`count` windows, none like another, nor like one of another `corpus`."""
    windows = PackedWindows([token_file([2, count * S - 3], first_id=1000 * (corpus + 1))], S)
    assert len(windows) == count
    return windows


def numbers(windows: PackedWindows, batch: Batch) -> list[int]:
    """Which window each row of a batch is."""
    names = {tuple(windows[i]["tokens"].tolist()): i for i in range(len(windows))}
    return [names[tuple(row)] for row in batch["tokens"].tolist()]


def take(loader: Loader, count: int) -> list[Batch]:
    return list(itertools.islice(loader, count))


def assert_same(left: list[Batch], right: list[Batch]) -> None:
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        assert a.keys() == b.keys()
        for name in a:
            np.testing.assert_array_equal(a[name], b[name])


def test_batches_are_int32_and_hold_whole_samples():
    windows = windows_of(5)
    with Loader(windows, global_batch_size=3, seed=0) as loader:
        batch = next(loader)
    assert set(batch) == {"tokens", "labels", "segment_ids", "positions"}
    for row, number in enumerate(numbers(windows, batch)):
        for name, array in batch.items():
            assert array.shape == (3, S) and array.dtype == np.int32
            np.testing.assert_array_equal(array[row], windows[number][name])


@settings(max_examples=30, deadline=None)
@given(count=st.integers(2, 20), batch=st.integers(1, 25), seed=st.integers(0, 2**40), prefetch=st.sampled_from([0, 3]))
def test_every_epoch_visits_every_window_once(count: int, batch: int, seed: int, prefetch: int):
    windows = windows_of(count)
    epochs = 3
    with Loader(windows, global_batch_size=batch, seed=seed, prefetch=prefetch) as loader:
        batches = take(loader, -(-epochs * count // batch))
    order = [number for batch in batches for number in numbers(windows, batch)]
    for epoch in range(epochs):
        assert sorted(order[epoch * count : (epoch + 1) * count]) == list(range(count))


def orders(seed: int, epochs: int, count: int = 40, **arguments) -> list[list[int]]:
    windows = windows_of(count)
    with Loader(windows, global_batch_size=count, seed=seed, **arguments) as loader:
        return [numbers(windows, batch) for batch in take(loader, epochs)]


@pytest.fixture(params=["small source", "large source"])
def both_shuffles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "large source":
        monkeypatch.setattr("moejax.data.loader._SMALL", 1)


@pytest.mark.usefixtures("both_shuffles")
def test_each_epoch_is_a_permutation_under_either_shuffle():
    for order in orders(11, 3):
        assert sorted(order) == list(range(40)) != order


@pytest.mark.usefixtures("both_shuffles")
def test_the_order_depends_on_seed_and_epoch_and_nothing_else():
    assert orders(7, 3) == orders(7, 3)
    different = orders(0, 4) + orders(1, 4) + orders(2, 4)  # epoch 1 of seed 0 is not epoch 0 of seed 1 either
    assert len({tuple(order) for order in different}) == 12


def test_without_shuffling_the_order_is_that_of_the_corpus():
    assert orders(0, 2, shuffle=False) == [list(range(40))] * 2


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_resuming_anywhere_gives_the_batches_that_would_have_followed(data: st.DataObject):
    windows = windows_of(data.draw(st.integers(1, 12), "windows"))
    batch = data.draw(st.sampled_from([1, 2, 4, 6]), "batch")
    stop = data.draw(st.integers(0, 15), "batches before the interruption")
    already = data.draw(st.integers(0, 5), "batches the new loader gave before set_state")
    with (
        Loader(windows, global_batch_size=batch, seed=3, prefetch=data.draw(st.sampled_from([0, 2, 5]))) as loader,
        Loader(windows, global_batch_size=batch, seed=3, prefetch=data.draw(st.sampled_from([0, 2, 5]))) as resumed,
    ):
        take(loader, stop)
        state = json.loads(json.dumps(loader.get_state()))
        take(resumed, already)
        resumed.set_state(state)
        assert resumed.get_state() == loader.get_state()
        assert_same(take(resumed, 8), take(loader, 8))
        assert resumed.positions == loader.positions


def test_taking_the_state_changes_nothing():
    windows = windows_of(9)
    with Loader(windows, global_batch_size=2, seed=3) as watched, Loader(windows, global_batch_size=2, seed=3) as plain:
        batches = []
        for _ in range(12):
            watched.get_state()
            batches += take(watched, 1)
        assert_same(batches, take(plain, 12))


@pytest.mark.parametrize("hosts", [2, 3, 6])
@pytest.mark.parametrize("count", [4, 31])
def test_hosts_hold_consecutive_rows_of_the_global_batch(hosts: int, count: int):
    sources = [windows_of(count), windows_of(count + 2, 1)]
    arguments = {"global_batch_size": 6, "seed": 5, "weights": [2, 1]}
    with Loader(sources, **arguments) as loader:
        expected = take(loader, 15)
        state = loader.get_state()
    shares = []
    for host in range(hosts):
        with Loader(sources, **arguments, host_index=host, host_count=hosts) as loader:
            shares.append(take(loader, 15))
            assert loader.get_state() == state
    together = [
        {name: np.concatenate([batch[name] for batch in rows]) for name in rows[0]}
        for rows in zip(*shares, strict=True)
    ]
    assert_same(together, expected)


def test_a_run_goes_on_with_another_batch_size_and_more_hosts():
    windows = windows_of(17)
    with Loader(windows, global_batch_size=1, seed=5) as loader:
        order = [numbers(windows, batch)[0] for batch in take(loader, 60)]
    with Loader(windows, global_batch_size=5, seed=5) as loader:
        first = [number for batch in take(loader, 3) for number in numbers(windows, batch)]
        state = loader.get_state()
    second = {}
    for host in range(2):
        with Loader(windows, global_batch_size=4, seed=5, host_index=host, host_count=2) as loader:
            loader.set_state(state)
            second[host] = [numbers(windows, batch) for batch in take(loader, 5)]
    rest = [number for rows in zip(second[0], second[1], strict=True) for row in rows for number in row]
    assert first + rest == order[: 15 + 20]


def test_positions_count_windows_and_epochs():
    windows = windows_of(7)
    with Loader(windows, global_batch_size=3, seed=0) as loader:
        seen = [(*loader.positions[0], loader.epoch, loader.sequences)]
        for _ in range(5):
            next(loader)
            seen.append((*loader.positions[0], loader.epoch, loader.sequences))
    assert seen == [(s // 7, s % 7, 7, s // 7, s) for s in (0, 3, 6, 9, 12, 15)]


def test_a_corpus_smaller_than_a_batch_repeats_within_it():
    windows = windows_of(2)
    with Loader(windows, global_batch_size=7, seed=0) as loader:
        order = [number for batch in take(loader, 2) for number in numbers(windows, batch)]
    assert Counter(order) == {0: 7, 1: 7}


@given(
    weights=st.lists(st.floats(0.01, 100), min_size=1, max_size=6),
    start=st.integers(0, 10**9),
    length=st.integers(1, 60),
)
def test_a_mixture_uses_each_sequence_of_each_source_once_and_keeps_its_proportions(
    weights: list[float], start: int, length: int
):
    mixture = Mixture(weights)
    expected = mixture.counts(start)
    for k in range(start, start + length):
        assert mixture.counts(k) == expected and sum(expected) == k
        source, number = mixture[k]
        assert number == expected[source]
        expected[source] += 1
    # Weights are kept to a millionth of their sum, each count to one sequence per source.
    for weight, count in zip(weights, expected, strict=True):
        exact = (start + length) * weight / sum(weights)
        assert abs(count - exact) <= len(weights) + (start + length) * 1e-6 * len(weights)


def test_a_mixture_has_its_proportions_in_every_batch_and_its_own_epochs():
    small, large = windows_of(3), windows_of(50, 1)
    of_small = {tuple(small[i]["tokens"].tolist()) for i in range(3)}
    of_large = {tuple(large[i]["tokens"].tolist()) for i in range(50)}
    assert not of_small & of_large
    with Loader([small, large], weights=[1, 3], global_batch_size=8, seed=0) as loader:
        batches = take(loader, 6)
        assert [sum(tuple(row) in of_small for row in batch["tokens"].tolist()) for batch in batches] == [2] * 6
        assert loader.positions == [(4, 0, 3), (0, 36, 50)]
        assert loader.epoch == 0
        rows = [tuple(row) for batch in batches for row in batch["tokens"].tolist()]
    counts = Counter(rows)
    assert {counts[row] for row in of_small} == {4}
    assert {counts[row] for row in of_large} == {0, 1}


def test_without_weights_a_mixture_ends_its_epochs_together():
    sources = [windows_of(10), windows_of(30, 1)]
    with Loader(sources, global_batch_size=4, seed=0) as loader:
        take(loader, 10)
        assert [(position.epoch, position.window) for position in loader.positions] == [(1, 0), (1, 0)]


def test_sources_of_a_mixture_are_shuffled_each_its_own_way():
    sources = [windows_of(40), windows_of(40, 1)]
    with Loader(sources, global_batch_size=80, seed=0, weights=[1, 1]) as loader:
        rows = next(loader)["tokens"].tolist()
    orders = [[i for row in rows for i in range(40) if source[i]["tokens"].tolist() == row] for source in sources]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(40))
    assert orders[0] != orders[1]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"seed": 1}, "seed (was 0, is 1)"),
        ({"shuffle": False}, "shuffle"),
        ({"weights": [1, 2]}, "weights"),
        ({"windows": [windows_of(8), windows_of(9, 2)]}, "data"),
    ],
)
def test_a_state_of_other_data_is_refused(change: dict, named: str):
    arguments = {"windows": [windows_of(8), windows_of(9, 1)], "global_batch_size": 2, "seed": 0}
    with Loader(**arguments) as loader, Loader(**arguments | change) as other:
        next(loader)
        with pytest.raises(UserError, match="data position does not fit") as raised:
            other.set_state(loader.get_state())
    assert named in str(raised.value)


@pytest.mark.parametrize("state", [{}, {"sequences": -1}, {"sequences": "3"}])
def test_a_broken_state_is_refused(state: dict):
    with Loader(windows_of(4), global_batch_size=2, seed=0) as loader:
        broken = {} if not state else loader.get_state() | state
        with pytest.raises(UserError, match="data position does not fit"):
            loader.set_state(broken)
        assert next(loader)["tokens"].shape == (2, S)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"windows": []}, "no data"),
        ({"seed": -1}, "data.seed is -1"),
        ({"global_batch_size": 3, "host_count": 2}, "does not divide over 2 hosts"),
        ({"global_batch_size": 0}, "does not divide"),
        ({"host_index": 2, "host_count": 2}, "host 2 of 2"),
        ({"weights": [1.0]}, "each source needs one"),
        ({"weights": [1.0, 0.0]}, "above 0"),
        ({"weights": [1.0, float("nan")]}, "above 0"),
        ({"windows": [windows_of(4), PackedWindows([token_file([30])], S + 1)]}, "differ in sequence_length"),
    ],
)
def test_bad_settings_are_sentences(arguments: dict, complaint: str):
    with pytest.raises(UserError, match=complaint):
        Loader(**{"windows": [windows_of(4), windows_of(4, 1)], "global_batch_size": 2, "seed": 0} | arguments)


def threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("grain-prefetch")}


@pytest.mark.parametrize("how", ["close", "drop", "set_state"])
def test_the_background_thread_ends(how: str):
    before = threads()
    loader = Loader(windows_of(50), global_batch_size=4, seed=0, prefetch=4)
    next(loader)
    started = threads() - before
    assert started
    if how == "close":
        loader.close()
        with pytest.raises(ValueError, match="closed"):
            next(loader)
    elif how == "set_state":
        loader.set_state(loader.get_state())
    del loader
    deadline = time.monotonic() + 10
    while any(thread.is_alive() for thread in started):
        assert time.monotonic() < deadline, "the thread goes on"
        time.sleep(0.01)


@settings(max_examples=30, deadline=None)
@given(count=st.integers(1, 20), rows=st.integers(1, 6), hosts=st.integers(1, 3))
def test_one_pass_counts_every_window_once_on_any_number_of_hosts(count: int, rows: int, hosts: int):
    windows = windows_of(count)
    size = rows * hosts
    shares = [list(one_pass(windows, global_batch_size=size, host_index=h, host_count=hosts)) for h in range(hosts)]
    assert {len(share) for share in shares} == {-(-count // size)}
    order = []
    for batches in zip(*shares, strict=True):
        for batch in batches:
            assert all(array.shape == (rows, S) and array.dtype == np.int32 for array in batch.values())
            counted = (batch["labels"] != IGNORED_LABEL).any(axis=1)
            order += [number for number, real in zip(numbers(windows, batch), counted, strict=True) if real]
    assert order == list(range(count))
