"""Capacity, rounds, windows and the choice of a transport: plain numbers, no devices."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moejax import config as c
from moejax.errors import UserError
from moejax.mesh import MeshShape
from moejax.moe.choose import choose_transport, options
from moejax.moe.collectives import exclusive_cumsum
from moejax.moe.layout import Layout, capacity_rows, count_rounds, most_rows, window
from moejax.moe.routes import Routes
from moejax.moe.rowwise import Rowwise

sizes = st.integers(1, 64)


@given(
    tokens=sizes,
    top_k=st.integers(1, 8),
    local=st.integers(1, 8),
    size=st.sampled_from([1, 2, 8]),
    factor=st.floats(0.01, 20),
)
def test_capacity(tokens: int, top_k: int, local: int, size: int, factor: float):
    """At least what was asked for and less than a row more; never more than can arrive; never none. Where the number
    drops no tokens, it is rounded up to whole tiles of the kernels."""
    layer = (tokens, top_k, size * local, size)
    rows, most = capacity_rows(*layer, factor, c.Overflow.drop), most_rows(*layer)
    assert 1 <= rows <= most
    assert rows == most or factor * tokens * top_k <= rows < factor * tokens * top_k + 1
    rounded = capacity_rows(*layer, factor, c.Overflow.exact)
    assert rounded % 8 == 0 and rows <= rounded < rows + 8


def a_layout(seed: int, devices: int = 3, local: int = 2) -> Layout:
    counts = np.random.default_rng(seed).integers(0, 7, (devices, devices, local))
    rows = exclusive_cumsum(jnp.asarray(counts.sum(0)), 1)[None] + exclusive_cumsum(jnp.asarray(counts), 0)
    none = jnp.zeros(0, jnp.int32)
    return Layout(Routes(none, none, none, none), none, jnp.asarray(counts), rows)


@given(seed=st.integers(0, 1000), buffer=st.integers(1, 40))
def test_windows_move_every_row_once(seed: int, buffer: int):
    """Over the agreed rounds each chunk is moved whole and in order, and no round overfills a buffer."""
    layout = a_layout(seed)
    rounds = int(count_rounds(layout.arriving, buffer))
    moved, arriving = np.zeros(layout.counts.shape, int), np.asarray(layout.arriving)
    for r in range(rounds):
        here = window(layout, r, buffer)
        filled = np.asarray(here.sizes).sum((0, 2))
        np.testing.assert_array_equal(filled, np.clip(arriving - r * buffer, 0, buffer))
        going = np.asarray(here.sizes) > 0
        np.testing.assert_array_equal(np.asarray(here.skipped)[going], moved[going])
        moved += np.asarray(here.sizes)
    np.testing.assert_array_equal(moved, layout.counts)
    assert rounds == 1 or arriving.max() > (rounds - 1) * buffer


BASE = c.Config()


def with_experts(**fields) -> c.Config:
    return replace(BASE, parallel=replace(BASE.parallel, experts=c.ExpertsConfig(**fields)))


@pytest.mark.parametrize(
    ("fields", "ep", "taken"),
    [
        ({}, 1, "local"),
        ({}, 8, "rowwise"),
        ({}, 16, "hierarchical"),
        (dict(devices_per_node=16), 16, "rowwise"),
        (dict(devices_per_node=1), 32, "hierarchical"),
        (dict(granularity=c.Granularity.peer), 16, "rowwise"),
        (dict(transport=c.Transport.all_gather), 8, "all_gather"),
        (dict(transport=c.Transport.all_to_all), 8, "all_to_all"),
    ],
)
def test_choice(fields: dict, ep: int, taken: str):
    choice = choose_transport(with_experts(**fields), MeshShape(ep=ep))
    assert choice.transport.name == taken
    assert f"> {taken}" in choice.table() and choice.record()["transport"] == taken


def test_more_devices_than_a_ragged_exchange_serves():
    config = replace(with_experts(), model=replace(BASE.model, moe=replace(BASE.model.moe, num_experts=64)))
    config = replace(config, train=replace(BASE.train, batch_tokens=64 * 1024))
    assert choose_transport(with_one_node(config, 64), MeshShape(ep=64)).transport.name == "all_to_all"
    with pytest.raises(UserError, match="at most 32 devices"):
        choose_transport(with_one_node(config, 64, transport=c.Transport.rowwise), MeshShape(ep=64))


def with_one_node(config: c.Config, devices: int, **fields) -> c.Config:
    experts = c.ExpertsConfig(devices_per_node=devices, **fields)
    return replace(config, parallel=replace(config.parallel, experts=experts))


@pytest.mark.parametrize(
    ("fields", "ep", "word"),
    [
        (dict(transport=c.Transport.local), 8, "needs ep=1"),
        (dict(transport=c.Transport.hierarchical), 8, "two or more whole nodes"),
        (dict(transport=c.Transport.hierarchical, devices_per_node=3), 8, "two or more whole nodes"),
    ],
)
def test_a_transport_outside_its_limits_is_refused(fields: dict, ep: int, word: str):
    with pytest.raises(UserError, match=word):
        choose_transport(with_experts(**fields), MeshShape(ep=ep))


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        (dict(capacity_factor=0.0), "capacity_factor=0.0 must be greater"),
        (dict(capacity_factor=-1.0), "capacity_factor"),
        (dict(devices_per_node=0), "devices_per_node"),
        (dict(transport=c.Transport.all_to_all, overflow=c.Overflow.drop), "overflow=drop"),
        (dict(transport=c.Transport.all_gather, granularity=c.Granularity.peer), "granularity=peer"),
    ],
)
def test_impossible_combinations_are_refused(fields: dict, word: str):
    with pytest.raises(UserError, match=word):
        c.validate(with_experts(**fields))


def test_bytes_of_the_table():
    """Per device and step: 4 exchanges of T K rows, 7/8 of them to others, for 3 MoE layers and 4 microbatches."""
    row = {option.transport: option for option in options(BASE, MeshShape(ep=8))}["rowwise"]
    tokens = BASE.train.batch_tokens // 4 // 8
    assert row.buffer_rows == 1.25 * tokens * 4
    assert row.sent_bytes == 4 * tokens * 4 * 7 // 8 * BASE.model.d_model * 2 * 3 * 4


def test_there_is_room_for_all_without_a_capacity():
    assert Rowwise("ep", 4).buffer_rows(10, 3, 8) == 4 * 10 * 2
