"""What the person at the keyboard sees of a run: a live display on a terminal, plain lines anywhere else.

    update(step, loss=..., tokens_per_s=..., ...) --terminal--> bar and figures, redrawn in place
                                                  --else------> one line of fixed columns every log_every steps
    say("Saved step 200.") --both--> a line of its own, above the display

Every `log_every`th line and every sentence also go to the run log (`moejax.observe.log`), whatever the stream is.
"""

import contextlib
import logging
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self, TextIO

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from moejax.errors import UserError
from moejax.observe.log import library, said

_GAP = "  "


@dataclass(frozen=True)
class Figures:
    """What is shown; None shows as "-". loss: nats a token. flops_per_s: model FLOP/s of all devices. seconds_left: s.

    grad_norm: global norm before clipping. load_imbalance: load of the fullest expert over the mean.
    """

    loss: float | None = None
    tokens_per_s: float | None = None
    flops_per_s: float | None = None
    grad_norm: float | None = None
    load_imbalance: float | None = None
    learning_rate: float | None = None
    seconds_left: float | None = None


class Progress:
    """Context manager around a run.

    total_steps, start_step: the run goes from start_step (done already) to total_steps.
    stream: where to write; default sys.stdout.
    is_terminal: None asks the stream; a terminal named "dumb" counts as none. No escape code is ever written to what is
    no terminal, FORCE_COLOR or not; NO_COLOR is respected.
    log_every: steps between plain lines; the first and the last step always have one.
    byte_tokens: one token is one byte, so the loss is shown in bits a byte too (loss / ln 2).
    """

    def __init__(
        self,
        total_steps: int,
        start_step: int = 0,
        stream: TextIO | None = None,
        is_terminal: bool | None = None,
        *,
        log_every: int = 10,
        byte_tokens: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.total_steps, self.start_step, self.step = total_steps, start_step, start_step
        self.figures = Figures()
        self._stream = sys.stdout if stream is None else stream
        self._log_every = max(log_every, 1)
        self._byte_tokens = byte_tokens
        self._clock = clock
        self._began = clock()
        self._updated = False
        self._shown_warnings = _ShownWarnings(self)
        self._propagate = library.propagate
        if is_terminal is None:
            is_terminal = self._stream.isatty() and os.environ.get("TERM", "").lower() not in ("dumb", "unknown")
        self._console = Console(file=self._stream, force_terminal=True, highlight=False) if is_terminal else None
        self._live: Live | None = None

    def __enter__(self) -> Self:
        self._began = self._clock()
        # Warnings appear above the display, and only there: JAX and Orbax leave a handler on the root logger.
        self._propagate, library.propagate = library.propagate, False
        library.addHandler(self._shown_warnings)
        if self._console is not None:
            own = self._stream in (sys.stdout, sys.stderr)
            self._live = Live(
                console=self._console,
                get_renderable=lambda: self,
                refresh_per_second=4,
                redirect_stdout=own,
                redirect_stderr=own,
            )
            self._live.start(refresh=True)
        return self

    def __exit__(self, *_: object) -> None:
        library.removeHandler(self._shown_warnings)
        library.propagate = self._propagate
        if self._live is not None:
            self._live.stop()
            self._live = None

    def update(self, step: int, **figures: float | None) -> None:
        """`step` steps are done. figures: fields of `Figures`; one that is not given keeps its last value."""
        self.figures = replace(self.figures, **figures)
        self.step = step
        due = not self._updated or step % self._log_every == 0 or step >= self.total_steps
        self._updated = True
        if due:
            line = self._line()
            said.info("%s", line)
            if self._console is None:
                self._print(line)

    def say(self, sentence: str) -> None:
        """Show a sentence on a line of its own and put it into the run log. Works before, during and after the run."""
        said.info("%s", sentence)
        self._show(sentence)

    def _show(self, sentence: str) -> None:
        sentence = _encodable(sentence, self._stream)
        if self._console is None:
            self._print(sentence)
        else:
            self._console.print(Text(sentence))

    def _print(self, line: str) -> None:
        try:
            print(line, file=self._stream, flush=True)
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise UserError(f"The output of the run cannot be written ({reason}); send it elsewhere.") from error

    def _line(self) -> str:
        digits = len(str(self.total_steps))
        cells = [f"step {self.step:>{digits}}/{self.total_steps}", *self._cells(), f"left {self._left():>11}"]
        return _GAP.join(cells)

    def _left(self) -> str:
        return format_seconds(self.figures.seconds_left)

    def _cells(self) -> list[str]:
        """The figures with their names, each of a width that does not change."""
        f = self.figures
        cells = [f"loss {_number(f.loss, '.4f', 7)}"]
        if self._byte_tokens:
            bits = None if f.loss is None else f.loss / math.log(2)
            cells.append(f"bits/byte {_number(bits, '.4f', 7)}")
        return cells + [
            f"tokens/s {_number(f.tokens_per_s, ',.0f', 11)}",
            f"model {format_flops(f.flops_per_s):>12}",
            f"grad norm {_number(f.grad_norm, '.3f', 8)}",
            f"load max/mean {_number(f.load_imbalance, '.2f', 6)}",
            f"learning rate {_number(f.learning_rate, '.2e', 8)}",
        ]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        done = min(self.step / self.total_steps, 1.0) if self.total_steps > 0 else 1.0
        before = f"step {self.step}/{self.total_steps}"
        # Until the first step has ended (it compiles), the time already spent shows that something happens.
        since = f"elapsed {format_seconds(self._clock() - self._began)}"
        after = f"{done:4.0%}{_GAP}{f'left {self._left()}' if self._updated else since}"
        room = width - len(before) - len(after) - 2 * len(_GAP)
        if room >= 8:
            grid = Table.grid(padding=(0, len(_GAP)), pad_edge=False)
            grid.add_row(before, ProgressBar(max(self.total_steps, 1), self.step, width=room), after)
            yield grid
        else:
            yield from map(Text, _flow([before, after], width))
        yield from map(Text, _flow(self._cells(), width))


class _ShownWarnings(logging.Handler):
    """Shows the warnings of moejax's modules in the display."""

    def __init__(self, progress: Progress):
        super().__init__(logging.WARNING)
        self._progress = progress

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(UserError):  # a stream that is gone must not make of a warning an error
            self._progress._show(f"{record.levelname.capitalize()}: {record.getMessage()}")


def format_flops(flops_per_s: float | None) -> str:
    """Three digits and the unit that suits them: 8.58e14 -> "858 TFLOP/s"; "-" for None."""
    if flops_per_s is None:
        return "-"
    value, prefixes = flops_per_s, ["", "k", "M", "G", "T", "P", "E"]
    while math.isfinite(value) and abs(value) >= 999.5 and len(prefixes) > 1:
        value /= 1000.0
        del prefixes[0]
    decimals = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:.{decimals}f} {prefixes[0]}FLOP/s"


def format_seconds(seconds: float | None) -> str:
    """h:mm:ss, with days before it from a day on: 93784 -> "1d 2:03:04"; "-" for None and what is no time."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    minutes, s = divmod(max(round(seconds), 0), 60)
    hours, m = divmod(minutes, 60)
    days, h = divmod(hours, 24)
    return (f"{days}d " if days else "") + f"{h}:{m:02d}:{s:02d}"


def _number(value: float | None, spec: str, width: int) -> str:
    """Right-aligned in `width` columns by `spec`; with an exponent and fewer digits where that would be too long."""
    text = "-" if value is None else format(value, spec)
    if value is not None and len(text) > width:
        text = format(value, f".{min(max(width - 6, 0), 2)}e")
    return text.rjust(width)


def _flow(cells: list[str], width: int) -> list[str]:
    """Cells in as few lines as hold them whole."""
    lines: list[str] = []
    for cell in cells:
        if lines and len(lines[-1]) + len(_GAP) + len(cell) <= width:
            lines[-1] += _GAP + cell
        else:
            lines.append(cell)
    return lines


def _encodable(text: str, stream: Any) -> str:
    """A sentence with a character that the stream cannot write shows "?" there."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return text.encode(encoding, "replace").decode(encoding)
