"""How fast a run goes: seconds a step, tokens/s, model FLOP/s and the time left, from the moments steps end.

start() ... finish(step) finish(step) ... --> seconds a step, last `window` intervals --median--> Rates
"""

import time
from collections import deque
from collections.abc import Callable
from statistics import median
from typing import NamedTuple


class Rates(NamedTuple):
    """seconds_per_step: median. tokens_per_s = tokens a step / that. flops_per_s = tokens_per_s * FLOPs a token, of all
    devices together. seconds_left = steps still to do * seconds_per_step (evaluations and saves not counted)."""

    seconds_per_step: float
    tokens_per_s: float
    flops_per_s: float
    seconds_left: float


class Throughput:
    """Keeps the last `window` step times of a run and answers with their median, which one slow step does not move.

    tokens_per_step: tokens of one global batch. flops_per_token: model FLOPs, forward and backward, without recompute
    (`moejax.accounting`). total_steps: where the run ends. warmup: the first so many steps are left out; they hold the
    compile. clock: monotonic seconds.
    """

    def __init__(
        self,
        tokens_per_step: float,
        flops_per_token: float,
        total_steps: int,
        *,
        window: int = 50,
        warmup: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.tokens_per_step, self.flops_per_token, self.total_steps = tokens_per_step, flops_per_token, total_steps
        self._clock = clock
        self._warmup = warmup
        self._seconds: deque[float] = deque(maxlen=window)
        self._step: int | None = None
        self._since: float | None = None

    def start(self, step: int) -> None:
        """The clock starts, with `step` steps done: before the first step, and after a pause (evaluation, save)."""
        self._step, self._since = step, self._clock()

    def finish(self, step: int) -> None:
        """Step `step` has ended, and all before it. When results are fetched only every n steps, calls may skip n - 1:
        the interval is then shared out evenly."""
        if self._step is None or self._since is None:
            raise ValueError("Throughput.start(step) comes before finish(step).")
        if step <= self._step:
            raise ValueError(f"Step {step} cannot end after step {self._step} has.")
        now = self._clock()
        steps = step - self._step
        if self._warmup > 0:
            self._warmup -= steps
        else:
            self._seconds.extend([(now - self._since) / steps] * min(steps, self._seconds.maxlen or steps))
        self._step, self._since = step, now

    def rates(self) -> Rates | None:
        """The figures now; None while every step so far was warm-up."""
        if not self._seconds or self._step is None:
            return None
        # A coarse clock may see no time pass; no rate is infinite.
        seconds = max(median(self._seconds), 1e-9)
        tokens_per_s = self.tokens_per_step / seconds
        left = max(self.total_steps - self._step, 0) * seconds
        return Rates(seconds, tokens_per_s, tokens_per_s * self.flops_per_token, left)
