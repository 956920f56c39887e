"""Ctrl-C and SIGTERM as a request to save and leave, not as an exception in the middle of a step."""

import signal
from types import FrameType
from typing import Any, Self


class Interruption:
    """Context manager: `asked` turns true at the first SIGINT or SIGTERM; a second one acts as it always did.

    Off the main thread, where Python hands out no signals, it does nothing.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    @property
    def asked(self) -> bool:
        return self.signal is not None

    @property
    def name(self) -> str:
        return "Ctrl-C" if self.signal == signal.SIGINT else self.signal.name if self.signal else ""

    @property
    def exit_code(self) -> int:
        """128 + signal, as a shell reports a process that a signal ended: the run is not finished."""
        return 128 + self.signal if self.signal else 0

    def __enter__(self) -> Self:
        try:
            self._before = {number: signal.signal(number, self._ask) for number in self.SIGNALS}
        except ValueError:  # not the main thread
            self._before = {}
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.signal = signal.Signals(number)
        self._restore()

    def _restore(self) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
        self._before = {}
