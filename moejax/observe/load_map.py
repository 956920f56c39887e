"""How evenly the experts were loaded: figures for a layer, and a map of all layers that fits in a terminal.

counts (token rows per expert) [E] or [L, E] --load_statistics--> {"max_over_mean": ...}
                                             --load_map--> "layer 0 ▃▄█▂·▄▄▅  1.93x  1 dead"
"""

import math

import numpy as np
from numpy.typing import ArrayLike

# Cells from least to most, and which of them (from 1) an expert at the mean gets: the last one stands for
# len(cells) / mean times the mean, and all above.
_BLOCKS = ("▁▂▃▄▅▆▇█", 4)
_DIGITS = ("123456789", 5)


def load_statistics(counts: ArrayLike) -> dict[str, float | list[float]]:
    """Figures of the load c_E of the experts of a layer, all in float64; with p = c / sum(c), mean over E:

    max_over_mean             max(c) / mean(c), from 1 (even) to E (all to one); Olmo-core load imbalance; MaxVio + 1
    coefficient_of_variation  sqrt(mean((c - mean(c))^2)) / mean(c), from 0 to sqrt(E - 1)
    entropy                   -sum p ln p in nats, 0 ln 0 = 0, from 0 to ln E
    entropy_fraction          entropy / ln E, from 0 to 1; 1 for a single expert
    dead_experts              experts with c = 0
    top_share                 max(p), from 1/E to 1

    counts: [E] gives numbers, [L, E] a list of L numbers under each key. A layer that saw no token has E dead experts
    and NaN for the rest. Raises ValueError for another shape and for negative or non-finite counts.
    """
    counts_LE = _checked(counts)
    E = counts_LE.shape[1]
    total_L = counts_LE.sum(axis=1)
    empty_L = total_L == 0
    most_L = counts_LE.max(axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        share_LE = counts_LE / total_L[:, None]
        entropy_L = -np.sum(share_LE * np.log(np.where(share_LE > 0, share_LE, 1.0)), axis=1)
        # Rounding may carry the sum past its bounds by an ulp or two.
        entropy_L = np.clip(entropy_L, 0.0, math.log(E))
        statistics = {
            "max_over_mean": most_L * E / total_L,
            "coefficient_of_variation": counts_LE.std(axis=1) / (total_L / E),
            "entropy": entropy_L,
            "entropy_fraction": entropy_L / math.log(E) if E > 1 else np.where(empty_L, np.nan, 1.0),
            "dead_experts": np.sum(counts_LE == 0, axis=1).astype(np.float64),
            "top_share": most_L / total_L,
        }
    single = np.ndim(counts) == 1
    return {name: float(value[0]) if single else value.tolist() for name, value in statistics.items()}


def load_map(counts: ArrayLike, *, width: int = 80, encoding: str | None = "utf-8") -> str:
    """One line a layer, one cell an expert: its load over the layer's mean, on the same scale in every map.

    counts: [E] or [L, E]. A cell is `·` for an expert that got nothing, half a block at the mean, a full block at twice
    the mean or more; where `encoding` has no blocks, `.` and the digits 1 to 9 (5 at the mean, 9 at 1.8 times it or
    more). Past the cells stand max/mean and, if any, the dead experts. When the experts are more than `width` columns
    hold, a cell stands for a few neighbours and shows the fullest; the first line says so. Raises ValueError as
    `load_statistics` does.
    """
    counts_LE = _checked(counts)
    L, E = counts_LE.shape
    statistics = load_statistics(counts_LE)
    cells, mean, nothing = _glyphs(encoding)

    names = [f"layer {layer:>{len(str(L - 1))}} " for layer in range(L)] if np.ndim(counts) == 2 else [""]
    dead = [int(number) for number in _listed(statistics["dead_experts"])]
    notes = [
        f" {ratio:.2f}x" + (f" {number} dead" if number else "")
        for ratio, number in zip(_listed(statistics["max_over_mean"]), dead, strict=True)
    ]
    room = max(width - len(names[0]) - max(map(len, notes)), 8)
    per_cell = -(-E // room)

    mean_L = counts_LE.mean(axis=1, keepdims=True)
    ratio_LE = np.divide(counts_LE, mean_L, out=np.zeros_like(counts_LE), where=mean_L > 0)
    level_LE = np.clip(np.floor(ratio_LE * mean + 0.5), 1, len(cells)).astype(int) * (counts_LE > 0)
    level_LC = np.maximum.reduceat(level_LE, range(0, E, per_cell), axis=1)

    head = f"{E} experts" + (f", {per_cell} to a cell (the fullest shows)" if per_cell > 1 else "")
    full = f"{len(cells) / mean:g}x or more"
    key = f"load: {nothing} none  {cells[mean - 1]} mean  {cells[-1]} {full}; max/mean at the end"
    rows = [
        name + "".join((nothing + cells)[level] for level in levels) + note
        for name, levels, note in zip(names, level_LC, notes, strict=True)
    ]
    return "\n".join([head, key, *rows])


def _glyphs(encoding: str | None) -> tuple[str, int, str]:
    """Cells, the place of the mean among them, and the sign for nothing at all."""
    try:
        (_BLOCKS[0] + "·").encode(encoding or "ascii")
        return *_BLOCKS, "·"
    except (UnicodeEncodeError, LookupError):
        return *_DIGITS, "."


def _checked(counts: ArrayLike) -> np.ndarray:
    array = np.asarray(counts, np.float64)
    if array.ndim not in (1, 2) or array.size == 0:
        raise ValueError(f"Expert counts are [experts] or [layers, experts], not of shape {list(array.shape)}.")
    if not (np.isfinite(array).all() and (array >= 0).all()):
        raise ValueError("Expert counts are finite and not negative.")
    return np.atleast_2d(array)


def _listed(value: float | list[float]) -> list[float]:
    return value if isinstance(value, list) else [value]
