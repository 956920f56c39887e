"""What the routing does: figures of each layer and step, and the alarm for balance that is only on paper.

    RouterStatistics, already on the host --routing_metrics--> {"gerrymander_index": [...], ...}
    gerrymander_index, load_max_over_mean of many steps --GerrymanderAlarm--> a sentence, or nothing

The load-balancing loss is (E/K) sum_e n_e mean_t(p_te) with no gradient in n_e: linear in the scores, so its least
value is below the 1 of even load. Experts that win many tokens by a hair and lose the others by far make n and p run
against each
other: the loss falls while the true load gets less even ("token gerrymandering" in the release of Olmo-core 3). Hence

    gerrymander_index = unscaled balance loss per token - 1   (for the batch as a whole: E^2 cov(load share, mean
    score))

next to the correlation of load and mean score, and to the true imbalance. Below zero, look at the imbalance.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from moejax.observe.load_map import load_statistics


def routing_metrics(routing: Any) -> dict[str, Any]:
    """Lists by layer, from `StepMetrics.routing` fetched to the host. Which router balances, and what the buffers saw:

    load_max_over_mean, load_variation, load_entropy (1 is even), dead_experts, top_share: of the routes per expert,
        before any drop (`load_map.load_statistics`).
    load_balancing_loss, router_z_loss: unweighted, per non-ignored token. router_margin: mean lead of the last chosen
        score over the next.
    gerrymander_index, load_score_correlation: see above; the correlation is 0 where all loads or all scores are equal.
    buffer_occupancy: fullest device's rows over its buffer, the most of the step. exchange_rounds: mean times the
        buffers were filled, 1 without overflow. overflow_rows, dropped_rows, drop_rate: all devices; the last over all
        routes.
    """
    counts_LE = np.asarray(routing.counts, np.float64)
    scores_LE = np.asarray(routing.scores, np.float64)
    load = load_statistics(counts_LE)
    tokens_L = np.maximum(scores_LE.sum(axis=1), 1e-30)  # scores sum to one per token: valid over non-ignored tokens
    routes_L = np.maximum(counts_LE.sum(axis=1), 1.0)

    def listed(values: Any) -> list[float]:
        return np.asarray(values, np.float64).tolist()

    return {
        "load_max_over_mean": load["max_over_mean"],
        "load_variation": load["coefficient_of_variation"],
        "load_entropy": load["entropy_fraction"],
        "dead_experts": load["dead_experts"],
        "top_share": load["top_share"],
        "load_balancing_loss": listed(routing.balance),
        "router_z_loss": listed(routing.z),
        "router_margin": listed(routing.margin / tokens_L),
        "gerrymander_index": listed(routing.balance / tokens_L - 1.0),
        "load_score_correlation": listed([_correlation(n, p) for n, p in zip(counts_LE, scores_LE, strict=True)]),
        "buffer_occupancy": listed(routing.occupancy),
        "exchange_rounds": listed(routing.rounds / np.maximum(routing.exchanges, 1.0)),
        "overflow_rows": listed(routing.overflow),
        "dropped_rows": listed(routing.dropped),
        "drop_rate": listed(routing.dropped / routes_L),
    }


def _correlation(a_E: np.ndarray, b_E: np.ndarray) -> float:
    """Pearson, 0 where one of them does not vary."""
    a_E, b_E = a_E - a_E.mean(), b_E - b_E.mean()
    size = np.sqrt(np.sum(a_E**2) * np.sum(b_E**2))
    return float(np.sum(a_E * b_E) / size) if size > 0 else 0.0


class GerrymanderAlarm:
    """Rings for a layer whose balance loss improves while its load gets less even.

    Compared are the two halves of the last `window` steps. It rings when the index is below zero on average over the
    later half, has fallen by at least `least_fall`, and max/mean load has grown by at least the share `least_growth`;
    and again only after that has ceased to be so.
    """

    def __init__(self, window: int = 100, least_fall: float = 0.005, least_growth: float = 0.05):
        if window < 2:
            raise ValueError(f"A window of {window} steps has no two halves; take at least 2.")
        self.window, self.least_fall, self.least_growth = window, least_fall, least_growth
        self._seen: deque[tuple[np.ndarray, np.ndarray]] = deque(maxlen=window)
        self._ringing: set[int] = set()

    def update(self, gerrymander_index: Sequence[float], load_max_over_mean: Sequence[float]) -> list[str]:
        """Takes a step's lists by layer; returns a sentence for each layer that begins to ring."""
        self._seen.append((np.asarray(gerrymander_index, float), np.asarray(load_max_over_mean, float)))
        if len(self._seen) < self.window:
            return []
        index_SL, load_SL = (np.stack(series) for series in zip(*self._seen, strict=True))
        half = self.window // 2
        index = index_SL[:half].mean(0), index_SL[half:].mean(0)
        load = load_SL[:half].mean(0), load_SL[half:].mean(0)
        rings_L = (
            (index[1] < 0) & (index[0] - index[1] >= self.least_fall) & (load[1] >= load[0] * (1 + self.least_growth))
        )
        ringing = set(np.flatnonzero(rings_L).tolist())
        new, self._ringing = sorted(ringing - self._ringing), ringing
        return [
            f"MoE layer {layer}: the balance loss improves ({index[0][layer]:+.3f} to {index[1][layer]:+.3f} around "
            f"even) while the load is less even (max/mean {load[0][layer]:.2f} to {load[1][layer]:.2f}): experts win "
            "tokens by thin margins, lose them by wide ones; raise model.moe.router.lb_loss or balance by score_bias."
            for layer in new
        ]
