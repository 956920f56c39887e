"""A profiler trace of some steps, for TensorBoard, XProf or Perfetto.

train.profile=[10, 13] --steps 11, 12 and 13--> <run>/profile/plugins/profile/<date>/*
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Self

import jax

from moejax.errors import UserError


class ProfiledSteps:
    """Context manager. window: (start, stop), traced are the steps after `start` up to `stop`; empty: none.

    Raises UserError when the trace cannot be written.
    """

    def __init__(self, window: Sequence[int], folder: Path | None):
        self._window: tuple[int, ...] = tuple(window) if folder is not None else ()
        self._folder = folder
        self._running = False

    def before_step(self, done: int) -> None:
        """`done` steps have been started."""
        if self._window and done == self._window[0]:
            jax.profiler.start_trace(str(self._folder))
            self._running = True

    def stops_after(self, done: int) -> bool:
        """Whether the trace ends here: the caller waits for the step, then calls `stop`."""
        return self._running and done == self._window[1]

    def stop(self) -> None:
        if self._running:
            self._running = False
            try:
                jax.profiler.stop_trace()
            except (OSError, RuntimeError) as error:
                raise UserError(f"The profile could not be written to {self._folder} ({error}).") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
