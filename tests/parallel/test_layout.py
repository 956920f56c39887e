"""Which layer lives where: every layer once, in order, and stacks that come back from the order of the stages."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moejax.errors import UserError
from moejax.parallel.layout import layers_of_virtual_stages, make_layout, to_logical, to_physical
from moejax.parallel.schedule_makers import make_schedule


def test_63_layers_over_16_virtual_stages_are_fifteen_times_4_and_once_3():
    layers = layers_of_virtual_stages(63, 16)
    assert [len(stage) for stage in layers] == [4] * 15 + [3]


@given(stages=st.integers(1, 20), more=st.integers(0, 80))
def test_layers_are_shared_out_in_order_and_evenly_the_last_stages_being_the_short_ones(stages: int, more: int):
    layers = layers_of_virtual_stages(stages + more, stages)
    assert [layer for stage in layers for layer in stage] == list(range(stages + more))
    sizes = [len(stage) for stage in layers]
    assert max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)


def test_fewer_layers_than_stages_are_refused():
    with pytest.raises(UserError, match="5 pipeline stages .* more than model.n_layers=4"):
        layers_of_virtual_stages(4, 5)


@st.composite
def models(draw):
    stages = draw(st.integers(1, 6))
    layers = draw(st.integers(stages, 20))
    return stages, layers, draw(st.integers(0, layers))


@given(model=models())
def test_each_stage_holds_its_layers_and_stacks_come_back(model: tuple[int, int, int]):
    stages, n_layers, n_dense = model
    layout = make_layout(n_layers, n_dense, make_schedule("1f1b", stages, 4))
    first = {"dense_blocks": 0, "moe_blocks": n_dense}
    counts = {"dense_blocks": n_dense, "moe_blocks": n_layers - n_dense}
    assert set(layout.stacks) == {name for name, count in counts.items() if count}
    held: list[int] = []
    for stage, layers in enumerate(layers_of_virtual_stages(n_layers, stages)):
        kind = layout.kinds[layout.kind_of[stage, 0]]
        assert (kind.first, kind.last) == (stage == 0, stage == stages - 1)
        assert layout.first_layer[stage, 0] == layers.start
        for name, here, slot in (
            ("dense_blocks", kind.n_dense, layout.first_dense_slot[stage, 0]),
            ("moe_blocks", kind.n_moe, layout.first_moe_slot[stage, 0]),
        ):
            if here:
                stack = layout.stacks[name]
                rows = stack.logical[stage * stack.slots + slot :][:here]
                held += [first[name] + row for row in rows]
    assert held == list(range(n_layers))
    for name, stack in layout.stacks.items():
        rows = {"w": jnp.arange(1.0, counts[name] + 1)[:, None] * jnp.ones((1, 3))}
        there = to_physical(rows, stack)
        assert len(there["w"]) == stages * stack.slots
        assert float(jnp.sum(there["w"])) == float(jnp.sum(rows["w"]))  # unused rows are zero
        np.testing.assert_array_equal(to_logical(there, stack)["w"], rows["w"])
