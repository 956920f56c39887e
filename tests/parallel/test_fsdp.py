"""Fully sharded weights: what a step holds and sends is what the strategy says. Losses: tests/mesh.

small config, two layers, ep=4 --compile--> collectives, shapes of the weights; impossible settings -> one sentence
"""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from moejax.accounting import parameter_counts
from moejax.errors import UserError
from moejax.hardware.collectives import by_kind, read
from moejax.hardware.hlo import switch_shares
from moejax.mesh import check_fit, parse_mesh
from tests.small import small_config, small_program

SMALL = ("parallel.strategy=fsdp", "model.n_layers=2", "model.n_dense_layers=0", "parallel.pipeline.microbatches=2")
DEVICES, MICROBATCHES = 4, 2


def test_every_weight_is_cut_over_all_devices_and_moves_three_times_a_microbatch():
    program = small_program("dp=2,ep=2", SMALL)
    weights = parameter_counts(program.config.model).total
    cut = jax.tree.leaves(program.param_specs, is_leaf=lambda spec: isinstance(spec, PartitionSpec))
    assert all(any(axis == ("dp", "ep") for axis in spec) for spec in cut)
    assert program.parameter_bytes_per_device() == 4 * weights // DEVICES  # fp32 in the small config
    assert program.transport.name == "local"

    shares = switch_shares(program.branch_shares())
    rows = by_kind(read(program.lower().compile().as_text(), dict(program.mesh.shape), shares=shares))
    sent = {kind: sum(row["bytes"] for row in rows if row["kind"] == kind) for kind in (row["kind"] for row in rows)}
    assert not {"all-to-all", "collective-permute"} & sent.keys()
    once = MICROBATCHES * 4 * weights * (DEVICES - 1) / DEVICES
    np.testing.assert_allclose(sent["reduce-scatter"], once, rtol=0.01)
    # blocks twice; embedding and head, gathered outside of the loops over layers, the compiler may gather once
    assert 1.5 * once < sent["all-gather"] <= 2.01 * once


def test_impossible_settings_are_told_with_the_way_out():
    with pytest.raises(UserError, match="needs pp=1, not pp=2; near it these fit: .*pp=1"):
        check_fit(small_config("parallel.strategy=fsdp"), parse_mesh("dp=2,pp=2"))
    with pytest.raises(UserError, match="transport=auto"):
        small_config("parallel.strategy=fsdp", "parallel.experts.transport=rowwise")
    check_fit(small_config("parallel.strategy=fsdp", "model.moe.num_experts=7"), parse_mesh("ep=4"))
