"""Figures of the routing, and the alarm: a constructed gerrymander rings it, balance and honest trouble do not."""

import numpy as np
import pytest

from moejax.moe.statistics import RouterStatistics
from moejax.observe.routing import GerrymanderAlarm, routing_metrics


def statistics(
    choices_LTE: np.ndarray, scores_LTE: np.ndarray, ignored: float = 1.0, **buffers: float
) -> RouterStatistics:
    """Of one batch of T tokens in L layers; `ignored`: valid over non-ignored tokens, as when some labels are
    ignored."""
    layers, tokens, experts = scores_LTE.shape
    counts = choices_LTE.sum(1).astype(float)
    balance = experts / choices_LTE.sum(2).mean() * np.sum(counts * scores_LTE.mean(1), axis=1)
    per_token = tokens / ignored
    ranked = -np.sort(-scores_LTE, axis=2)
    margin = (ranked[..., 0] - ranked[..., 1]).sum(1)
    fill = {name: np.full(layers, buffers.get(name, 0.0)) for name in RouterStatistics._fields[5:]}
    return RouterStatistics(
        counts, scores_LTE.sum(1) / per_token, balance / per_token, np.zeros(layers), margin / per_token, **fill
    )


def two_experts(won_thin: float, tokens: int = 400) -> RouterStatistics:
    """Expert 0 wins this share of the tokens by a hair (0.51 to 0.49) and loses the others by far (0.01 to 0.99)."""
    thin = np.arange(tokens) < won_thin * tokens
    p = np.where(thin, 0.51, 0.01)
    scores = np.stack([p, 1 - p], axis=1)[None]
    return statistics(scores == scores.max(2, keepdims=True), scores)


def test_thin_and_wide_margins_make_the_index_negative():
    """The example of the release: at 75 % the loss is 0.885 of its value at even load, and the imbalance 1.5."""
    found = routing_metrics(two_experts(0.75))
    assert found["gerrymander_index"][0] == pytest.approx(2 * (0.75 * 0.385 + 0.25 * 0.615) - 1)
    assert found["load_max_over_mean"][0] == pytest.approx(1.5)
    assert found["load_score_correlation"][0] == pytest.approx(-1)


def test_even_load_is_zero():
    scores = np.full((2, 8, 4), 0.25)
    choices = np.arange(4) == (np.arange(8) % 4)[:, None]
    found = routing_metrics(statistics(np.stack([choices] * 2), scores))
    np.testing.assert_allclose(found["gerrymander_index"], 0, atol=1e-12)
    assert found["load_score_correlation"] == [0.0, 0.0]
    assert found["load_entropy"] == [1.0, 1.0]


def test_the_index_does_not_depend_on_ignored_labels():
    scores = np.random.default_rng(0).dirichlet(np.ones(4), (1, 50))
    choices = scores == scores.max(2, keepdims=True)
    whole, half = (routing_metrics(statistics(choices, scores, ignored)) for ignored in (1.0, 2.0))
    for name in ("gerrymander_index", "router_margin"):
        np.testing.assert_allclose(whole[name], half[name], rtol=1e-12)


def test_confident_routing_of_uneven_load_is_no_gerrymander():
    """Load and score rise together: the index is positive, as the loss promises."""
    p = np.where(np.arange(400) < 300, 0.9, 0.1)
    scores = np.stack([p, 1 - p], axis=1)[None]
    found = routing_metrics(statistics(scores == scores.max(2, keepdims=True), scores))
    assert found["gerrymander_index"][0] > 0.1 and found["load_score_correlation"][0] > 0.99


def test_what_the_buffers_saw():
    scores = np.full((1, 8, 2), 0.5)
    choices = np.ones((1, 8, 2), bool)
    seen = statistics(choices, scores, occupancy=1.5, overflow=4.0, dropped=2.0, rounds=6.0, exchanges=4.0)
    found = routing_metrics(seen)
    assert found["buffer_occupancy"] == [1.5] and found["exchange_rounds"] == [1.5]
    assert found["overflow_rows"] == [4.0] and found["dropped_rows"] == [2.0]
    assert found["drop_rate"] == [2 / 16]


def rings(alarm: GerrymanderAlarm, steps: list[RouterStatistics]) -> list[str]:
    said = []
    for step in steps:
        found = routing_metrics(step)
        said += alarm.update(found["gerrymander_index"], found["load_max_over_mean"])
    return said


def test_the_alarm_rings_once_for_a_growing_gerrymander():
    said = rings(GerrymanderAlarm(window=20), [two_experts(share) for share in np.linspace(0.5, 0.9, 60)])
    assert len(said) == 1 and said[0].startswith("MoE layer 0:")


def balanced(rng: np.random.Generator) -> RouterStatistics:
    scores = rng.dirichlet(np.ones(4), (1, 400))
    return statistics(scores == scores.max(2, keepdims=True), scores)


def worsening(share: float) -> RouterStatistics:
    p = np.where(np.arange(400) < share * 400, 0.8, 0.2)
    scores = np.stack([p, 1 - p], axis=1)[None]
    return statistics(scores == scores.max(2, keepdims=True), scores)


def test_the_alarm_is_silent_otherwise():
    rng = np.random.default_rng(1)
    assert rings(GerrymanderAlarm(window=20), [balanced(rng) for _ in range(60)]) == []
    assert rings(GerrymanderAlarm(window=20), [two_experts(0.75)] * 60) == []  # neither improves nor worsens
    assert rings(GerrymanderAlarm(window=20), [worsening(share) for share in np.linspace(0.5, 0.9, 60)]) == []
