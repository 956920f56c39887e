"""Expert parallelism inside the train step: statistics add up, rounds change nothing, a score bias is kept."""

import jax
import numpy as np
import pytest

from tests.small import small_batch, small_program

# parameters far from their initial ones route unevenly; a small capacity makes sure of several rounds
OVERRIDES = (
    "parallel.experts.capacity_factor=0.5",
    "model.n_layers=2",
    "parallel.pipeline.microbatches=2",
    "model.moe.router.score_bias=sign",
    "model.moe.router.score_bias_rate=0.25",
)


@pytest.fixture(scope="module")
def stepped():
    """(program, state after one step, its metrics, on the host) of ep=4 by rowwise, in several rounds."""
    program = small_program("ep=4", OVERRIDES)
    state, metrics = program.step(program.init(), program.place_batch(small_batch(program.config)))
    return program, state, jax.device_get(metrics)


def test_statistics_are_those_of_the_whole_batch(stepped):
    program, _, metrics = stepped
    routing, moe = metrics.routing, program.config.model.moe
    valid = np.sum(small_batch(program.config)["segment_ids"] >= 0)
    np.testing.assert_array_equal(routing.counts.sum(1), moe.top_k * valid)
    np.testing.assert_allclose(routing.scores.sum(1) * metrics.tokens, valid, rtol=1e-5)
    microbatches, devices = program.config.parallel.pipeline.microbatches, 4
    np.testing.assert_array_equal(routing.exchanges, microbatches * devices)
    # half the mean fits: at least two rounds, at most what all tokens on one device need
    rounds = routing.rounds / routing.exchanges
    assert np.all(rounds >= 2) and np.all(rounds <= 8)
    assert np.all(routing.occupancy >= 2) and np.all(routing.dropped == 0)
    buffer = program.receive_buffer_rows()
    assert np.all(routing.overflow >= moe.top_k * valid - microbatches * devices * buffer)


def test_several_rounds_give_the_step_of_one_device(stepped):
    _, state, metrics = stepped
    alone = small_program("dp=1", OVERRIDES[1:])
    other, expected = alone.step(alone.init(), alone.place_batch(small_batch(alone.config)))
    np.testing.assert_allclose(metrics.loss, expected.loss, rtol=1e-6)
    np.testing.assert_allclose(metrics.gradient_norm, expected.gradient_norm, rtol=1e-5)
    np.testing.assert_array_equal(metrics.routing.counts, expected.routing.counts)
    np.testing.assert_array_equal(state.score_bias, other.score_bias)


def test_the_score_bias_follows_the_load(stepped):
    program, state, metrics = stepped
    counts = metrics.routing.counts
    expected = 0.25 * np.sign(counts.mean(1, keepdims=True) - counts)
    np.testing.assert_array_equal(state.score_bias, expected)
    portable = program.portable(state)
    np.testing.assert_array_equal(portable.score_bias, expected)
    np.testing.assert_array_equal(program.from_portable(portable).score_bias, expected)
    target = program.portable_target()
    assert target.score_bias.shape == expected.shape and target.score_bias.dtype == np.float32


def test_a_model_without_experts_has_no_score_bias():
    program = small_program("dp=1", ("model.n_layers=1",))
    assert program.portable_target().score_bias is None
