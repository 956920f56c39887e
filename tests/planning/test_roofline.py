"""The roofline adds up: no faster than the work allows, what is computed again costs, bubbles are the table's."""

import dataclasses

import pytest

from moejax.parallel.schedules import Op, bubble
from moejax.planning.collectives import collectives
from moejax.planning.roofline import ATTAINED, Rates, estimate, measured, op_times
from tests.planning.setups import published, small_setup


@pytest.mark.parametrize("name", ["moe_8l_128e", "tiny_64e", "medium_128e", "ultra_128e"])
def test_no_step_is_faster_than_its_model_flops(name):
    time = estimate(published(name))
    assert 0 < time.mfu < ATTAINED["compute"]
    assert sum(term.seconds for term in time.terms) == pytest.approx(time.step_seconds)
    assert time.tokens_per_second_per_gpu * time.step_seconds > 0


def test_a_device_at_its_peaks_does_nothing_but_model_work():
    """With free memory and links, what is left is the model's FLOPs at the peak, and the fp32 router."""
    setup = published("moe_8l_64e", "ep=8", "model.moe.router.assignment=learned")
    fast = dataclasses.replace(
        setup.gpu, hbm_bytes_per_second=1e30, nvlink_bytes_per_second=1e30, network_bytes_per_second=1e30
    )
    time = estimate(dataclasses.replace(setup, gpu=fast), dict.fromkeys(ATTAINED, 1.0))
    assert time.mfu == pytest.approx(1, rel=0.01)
    assert time.bubble == 0


def test_what_is_computed_again_costs_a_forward():
    """1f1b of 4 stages: a stage's forward runs again for its backward, a block's once more inside it."""
    rates = {}
    for recompute in ("none", "block"):
        setup = published("medium_64e", "pp=2,dp=4,ep=8", f"parallel.recompute={recompute}")
        times = op_times(setup, Rates.of(setup))
        forward = sum(times[Op.FORWARD, 0].values())
        rates[recompute] = sum(times[Op.BACKWARD, 0].values()) / forward
    assert rates["block"] - rates["none"] == pytest.approx(1, rel=1e-6)
    assert 2.7 < rates["none"] < 3.3  # a forward, its two gradients without its exchanges, and adding them up


def test_the_bubble_is_the_schedule_s():
    """Layers alike on all stages and no head to speak of: the idle share of the table with these costs."""
    setup = small_setup("pp=4,ep=2", "model.n_layers=8", "model.n_dense_layers=0", "model.vocab_size=1")
    times = op_times(setup, Rates.of(setup))
    costs = {op: sum(times[op, 1].values()) for op in (Op.FORWARD, Op.BACKWARD)}
    # the last stage's forward is an idle tick, so compare with a tolerance of one stage's forwards
    assert estimate(setup).bubble == pytest.approx(bubble(setup.schedule, costs), abs=0.08)


@pytest.mark.parametrize(("rate", "tflops"), [(52_000, 946), (19_400, 353)])
def test_published_rates_are_the_published_tflops(rate, tflops):
    assert measured(published("moe_8l_128e"), rate).model_tflops_per_gpu == pytest.approx(tflops, abs=0.5)


def test_experts_that_span_nodes_cross_both_links():
    rows = collectives(published("ultra_256e"))
    assert {row.link for row in rows if row.axis == "ep"} == {"nvlink", "network"}
    inside = [row for row in collectives(published("ultra_128e")) if row.axis == "ep"]
    assert {row.link for row in inside} == {"nvlink"}
    assert {row.kind for row in inside} == {"ragged-all-to-all"}
