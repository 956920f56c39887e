"""Timing things against each other on a machine that is never quiet.

    {name: call} --a turn runs each once, another one first every time--> seconds [turns] of each --> medians, ratios

Clocks move and neighbours come and go, so a figure from one minute says little about one from the next. Within a turn
they are a second apart: the ratio of two calls is taken turn by turn, and its median is what a benchmark should quote.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np


class Timing(NamedTuple):
    """seconds: median over the turns. spread: distance of the quartiles over the median. ratio: median over the turns
    of the first call's time over this one's, so above 1 is faster than the first."""

    seconds: float
    spread: float
    ratio: float


def interleaved(calls: Mapping[str, Callable[[], Any]], turns: int) -> dict[str, Timing]:
    """Runs every call once untimed, then `turns` >= 1 times in rotating order, waiting for its result each time."""
    for call in calls.values():
        jax.block_until_ready(call())
    names = list(calls)
    seconds = {name: np.zeros(turns) for name in names}
    for turn in range(turns):
        for n in range(len(names)):
            name = names[(turn + n) % len(names)]
            begin = time.perf_counter()
            jax.block_until_ready(calls[name]())
            seconds[name][turn] = time.perf_counter() - begin
    first = seconds[names[0]]
    return {name: _timing(first, own) for name, own in seconds.items()}


def _timing(first: np.ndarray, own: np.ndarray) -> Timing:
    low, median, high = np.quantile(own, [0.25, 0.5, 0.75])
    return Timing(float(median), float((high - low) / median), float(np.median(first / own)))
