"""Load statistics against values worked out by hand and against their bounds; the map shows what the counts say."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moejax.observe.load_map import load_map, load_statistics

loads = st.lists(st.integers(0, 10**9), min_size=1, max_size=300)


def test_figures_worked_out_by_hand():
    figures = load_statistics([4, 2, 1, 1, 0, 0, 0, 0])
    assert figures["max_over_mean"] == 4.0
    assert figures["coefficient_of_variation"] == pytest.approx(math.sqrt(14 / 8))  # variance 22/8 - 1, mean 1
    assert figures["entropy"] == pytest.approx(1.75 * math.log(2))  # 1/2*1 + 1/4*2 + 2 * 1/8*3 bits
    assert figures["entropy_fraction"] == pytest.approx(1.75 / 3)
    assert figures["dead_experts"] == 4
    assert figures["top_share"] == 0.5


@given(loads)
def test_figures_keep_their_bounds(counts):
    E, figures = len(counts), load_statistics(counts)
    assert figures["dead_experts"] == counts.count(0)
    if sum(counts) == 0:
        assert all(math.isnan(value) for name, value in figures.items() if name != "dead_experts")
        return
    assert 1 <= figures["max_over_mean"] <= E
    assert 0 <= figures["coefficient_of_variation"] <= math.sqrt(E - 1) * (1 + 1e-12)
    assert 0 <= figures["entropy"] <= math.log(E)
    assert 0 <= figures["entropy_fraction"] <= 1
    assert figures["top_share"] == pytest.approx(figures["max_over_mean"] / E)
    # Entropy is at least that of the fullest expert's share alone.
    assert figures["entropy"] >= -math.log(figures["top_share"]) - 1e-9


@given(loads.filter(any), st.integers(1, 1000), st.randoms())
def test_figures_depend_neither_on_the_order_nor_on_the_number_of_tokens(counts, factor, random):
    other = [count * factor for count in counts]
    random.shuffle(other)
    assert load_statistics(other) == pytest.approx(load_statistics(counts), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("E", [1, 2, 128])
def test_the_even_and_the_collapsed_load_reach_the_bounds(E):
    even, collapsed = load_statistics([7] * E), load_statistics([7] + [0] * (E - 1))
    assert (even["max_over_mean"], even["coefficient_of_variation"], even["entropy_fraction"]) == (1, 0, 1)
    assert (collapsed["max_over_mean"], collapsed["top_share"], collapsed["dead_experts"]) == (E, 1, E - 1)
    assert collapsed["entropy"] == 0
    assert collapsed["coefficient_of_variation"] == pytest.approx(math.sqrt(E - 1))


def test_layers_are_described_one_by_one():
    counts_LE = np.random.default_rng(0).integers(0, 9, (5, 16))
    together = load_statistics(counts_LE)
    for layer, counts in enumerate(counts_LE):
        assert load_statistics(counts) == pytest.approx({name: value[layer] for name, value in together.items()})


@pytest.mark.parametrize("counts", [[], 3, [[[1]]], [-1, 2], [math.nan]])
def test_what_is_no_count_is_refused(counts):
    with pytest.raises(ValueError, match="Expert counts are"):
        load_statistics(counts)
    with pytest.raises(ValueError, match="Expert counts are"):
        load_map(counts)


def cells(line):
    return line.split()[-2] if "x" in line.split()[-1] else line.split()[-4]


def test_a_map_worked_out_by_hand():
    text = load_map([[2, 2, 2, 2], [0, 8, 0, 0], [1, 2, 4, 1]])
    assert text.splitlines()[2:] == ["layer 0 ▄▄▄▄ 1.00x", "layer 1 ·█·· 4.00x 3 dead", "layer 2 ▂▄█▂ 2.00x"]
    ascii_text = load_map([[2, 2, 2, 2], [0, 8, 0, 0], [1, 2, 4, 1]], encoding="ascii")
    assert ascii_text.isascii()
    assert ascii_text.splitlines()[2:] == ["layer 0 5555 1.00x", "layer 1 .9.. 4.00x 3 dead", "layer 2 3593 2.00x"]


@given(st.integers(1, 20), st.integers(1, 300), st.integers(60, 120), st.integers(0, 2**32 - 1))
def test_a_map_fits_and_fuller_experts_never_look_emptier(L, E, width, seed):
    counts_LE = np.random.default_rng(seed).poisson(3, (L, E))
    head, key, *rows = load_map(counts_LE, width=width).splitlines()
    assert len(rows) == L and max(map(len, [head, key, *rows])) <= width
    per_cell = int(head.split(", ")[1].split()[0]) if "to a cell" in head else 1
    for row, counts in zip(rows, counts_LE, strict=True):
        drawn = ["·▁▂▃▄▅▆▇█".index(cell) for cell in cells(row)]
        most = [max(counts[i : i + per_cell]) for i in range(0, E, per_cell)]
        assert len(drawn) == len(most)
        order = np.argsort(most, kind="stable")
        assert (np.diff(np.array(drawn)[order]) >= 0).all()
        assert [cell == 0 for cell in drawn] == [count == 0 for count in most]


def test_a_layer_without_tokens_is_drawn_empty():
    assert load_map([[0, 0], [1, 1]]).splitlines()[2:] == ["layer 0 ·· nanx 2 dead", "layer 1 ▄▄ 1.00x"]
    assert load_map([0, 3]).splitlines()[2] == "·█ 2.00x 1 dead"
