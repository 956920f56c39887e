"""Progress: the same figures on a terminal of 80 columns and in plain lines, escape codes on the terminal only."""

import io
import logging
import math
import os
import pty
import re
import select
import subprocess
import sys
import termios
import time
import warnings

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from moejax.errors import UserError
from moejax.observe.progress import Progress, format_flops, format_seconds

FIGURES = {
    "loss": 2.34567,
    "tokens_per_s": 12345678.9,
    "flops_per_s": 3.53e14,
    "grad_norm": 123.4567,
    "load_imbalance": 12.345,
    "learning_rate": 3.0e-4,
    "seconds_left": 93784.0,
}
SHOWN = [
    "loss 2.3457",
    "bits/byte 3.3841",
    "tokens/s 12,345,679",
    "model 353 TFLOP/s",
    "grad norm 123.457",
    "load max/mean 12.35",
    "learning rate 3.00e-04",
    "left 1d 2:03:04",
]
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")
CURSOR_UP = re.compile(r"\x1b\[\d*A")
COLOUR = re.compile(r"\x1b\[[0-9;]*[3-49][0-9][0-9;]*m")


def squeeze(text):
    return re.sub(r"[ \n\r]+", " ", text)


def frames(output):
    """The states of the display, without escape codes."""
    return [ESCAPE.sub("", frame).replace("\r", "") for frame in CURSOR_UP.split(output)]


def drive(stream, is_terminal, steps=25, **options):
    with Progress(1_000_000, 0, stream, is_terminal, byte_tokens=True, **options) as progress:
        progress.say("Mesh [bold]dp=2[/bold].")
        for step in range(1, steps + 1):
            progress.update(step, **FIGURES)
        progress.say("Saved step 25.")
    return stream.getvalue()


@pytest.fixture
def columns(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)

    def resize(width):
        monkeypatch.setenv("COLUMNS", str(width))
        monkeypatch.setenv("LINES", "24")

    resize(80)
    return resize


def test_plain_lines_carry_every_figure_in_fixed_columns_and_no_escape(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TTY_INTERACTIVE", "1")
    output = drive(io.StringIO(), None)
    assert "\x1b" not in output and "\r" not in output
    first, *steps, last = output.splitlines()
    assert (first, last) == ("Mesh [bold]dp=2[/bold].", "Saved step 25.")
    assert [squeeze(line).split()[1] for line in steps] == ["1/1000000", "10/1000000", "20/1000000"]
    assert all(figure in squeeze(line) for line in steps for figure in SHOWN)


@given(
    figures=st.fixed_dictionaries(
        {name: st.none() | st.floats(1e-6, 1e9) for name in FIGURES} | {"loss": st.floats(0, 1e4) | st.just(math.nan)}
    )
)
@example(figures=dict.fromkeys(FIGURES))
def test_columns_stay_where_they_are(figures):
    stream = io.StringIO()
    with Progress(10, 0, stream, log_every=1, byte_tokens=True) as progress:
        progress.update(1, **FIGURES)
        progress.update(2, **figures)
    names = ["loss", "bits/byte", "tokens/s", "model", "grad norm", "load max/mean", "learning rate", "left"]
    a, b = stream.getvalue().splitlines()
    assert [a.index(name) for name in names] == [b.index(name) for name in names]


def test_first_and_last_step_have_a_line_and_a_resume_starts_with_one():
    stream = io.StringIO()
    with Progress(33, 17, stream, log_every=10) as progress:
        for step in range(18, 34):
            progress.update(step, loss=1.0)
    assert [line.split()[1] for line in stream.getvalue().splitlines()] == ["18/33", "20/33", "30/33", "33/33"]


def test_a_figure_not_given_keeps_its_value_and_one_never_given_is_a_dash():
    stream = io.StringIO()
    with Progress(2, 0, stream, log_every=1) as progress:
        progress.update(1, loss=2.5, grad_norm=1.0)
        progress.update(2, grad_norm=3.0)
    line = squeeze(stream.getvalue().splitlines()[-1])
    assert "loss 2.5000" in line and "grad norm 3.000" in line and "left -" in line and "bits/byte" not in line


def test_an_unknown_figure_is_a_fault():
    with pytest.raises(TypeError, match="lss"):
        Progress(2, 0, io.StringIO()).update(1, lss=2.5)


@pytest.mark.parametrize("width", [80, 100, 40])
def test_a_terminal_shows_every_figure_and_no_line_is_cut(columns, width):
    columns(width)
    output = drive(io.StringIO(), True)
    last = frames(output)[-1]
    assert all(figure in squeeze(last) for figure in ["step 25/1000000", *SHOWN])
    assert max(map(len, last.splitlines())) <= width and "…" not in output
    assert ("━" in last) == (width >= 80)
    assert len(last.splitlines()) <= (3 if width >= 80 else 6)
    assert "Mesh [bold]dp=2[/bold].\n" in ESCAPE.sub("", output) and "Saved step 25.\n" in ESCAPE.sub("", output)


def test_before_the_first_step_the_time_spent_is_shown(columns):
    ticks = iter([0.0] * 3 + [75.0] * 100)
    stream = io.StringIO()
    with Progress(10, 0, stream, True, clock=lambda: next(ticks)) as progress:
        progress.say("Compiling.")
    assert "elapsed 0:01:15" in frames(stream.getvalue())[-1]


def test_no_color_leaves_no_colour(columns, monkeypatch):
    assert COLOUR.search(drive(io.StringIO(), True))
    monkeypatch.setenv("NO_COLOR", "1")
    assert not COLOUR.search(drive(io.StringIO(), True))


@pytest.mark.parametrize("is_terminal", [True, False])
def test_warnings_of_the_library_are_shown_and_only_while_it_runs(columns, is_terminal, capfd):
    stream = io.StringIO()
    logger = logging.getLogger("moejax.somewhere")
    with Progress(10, 0, stream, is_terminal):
        logger.warning("Line %d is odd.", 7)
        logger.info("not shown")
    handlers, propagate = logging.getLogger("moejax").handlers, logging.getLogger("moejax").propagate
    assert "Warning: Line 7 is odd." in ESCAPE.sub("", stream.getvalue()) and "not shown" not in stream.getvalue()
    assert propagate and not any(type(handler).__name__ == "_ShownWarnings" for handler in handlers)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_stream_without_unicode_gets_a_question_mark(columns, is_terminal):
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    with Progress(10, 0, stream, is_terminal) as progress:
        progress.say("Schön · fertig")
        progress.update(5, **FIGURES)
    stream.flush()
    assert b"Sch?n ? fertig" in raw.getvalue()


def test_an_output_that_is_full_is_one_sentence():
    with open("/dev/full", "w") as stream:
        with pytest.raises(UserError, match=r"cannot be written \(no space left on device\)"):
            Progress(10, 0, stream).say("Hello.")
        with pytest.raises(OSError):  # what `say` left in the buffer
            stream.close()


SCRIPT = f"""
import sys
from moejax.observe.progress import Progress
with Progress(1000000, 0, sys.stdout, byte_tokens=True) as progress:
    progress.say("Starting.")
    for step in range(1, 26): progress.update(step, **{FIGURES!r})
    print("printed by somebody else")
"""


def in_pty(**environment):
    """What the script writes to a pseudo-terminal of 80 columns."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the process has threads, but we exec at once
        ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    blank = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR")}
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=blank | {"TERM": "xterm", "PYTHONIOENCODING": "utf-8"} | environment,
    )
    os.close(theirs)
    output, deadline = b"", time.monotonic() + 60
    try:
        while time.monotonic() < deadline:
            if select.select([ours], [], [], 1)[0]:
                try:
                    chunk = os.read(ours, 65536)
                except OSError:  # EIO: the other side has closed
                    break
                if not chunk:
                    break
                output += chunk
        assert process.wait(10) == 0, output.decode()
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    return output.decode()


def test_a_real_terminal_is_recognised_and_shows_every_figure():
    output = in_pty()
    last = frames(output)[-1]
    assert all(figure in squeeze(last) for figure in ["step 25/1000000", *SHOWN])
    assert max(map(len, last.splitlines())) <= 80
    assert "printed by somebody else" in output and output.rstrip().endswith("\x1b[?25h")  # the cursor is back


def test_a_dumb_terminal_gets_plain_lines():
    output = in_pty(TERM="dumb")
    assert "\x1b" not in output and "step      25" not in output
    assert all(figure in squeeze(output) for figure in ["step 20/1000000", *SHOWN])


@pytest.mark.parametrize(
    "flops, text",
    [
        (None, "-"),
        (0.0, "0.00 FLOP/s"),
        (999.4, "999 FLOP/s"),
        (1234.0, "1.23 kFLOP/s"),
        (3.53e14, "353 TFLOP/s"),
        (9.996e11, "1.00 TFLOP/s"),
        (9.994e9, "9.99 GFLOP/s"),
        (9.996e9, "10.0 GFLOP/s"),
        (2.5e22, "25000 EFLOP/s"),
        (math.nan, "nan FLOP/s"),
    ],
)
def test_flops_take_the_unit_that_suits_them(flops, text):
    assert format_flops(flops) == text


@given(st.floats(1, 1e20))
def test_flops_read_back_to_three_digits(flops):
    number, unit = format_flops(flops).split()
    factor = 1000.0 ** ["FLOP/s", "kFLOP/s", "MFLOP/s", "GFLOP/s", "TFLOP/s", "PFLOP/s", "EFLOP/s"].index(unit)
    assert float(number) * factor == pytest.approx(flops, rel=5.1e-3) and 1 <= float(number) < 1000


@pytest.mark.parametrize(
    "seconds, text",
    [(None, "-"), (math.inf, "-"), (0, "0:00:00"), (59.6, "0:01:00"), (7384, "2:03:04"), (93784, "1d 2:03:04")],
)
def test_seconds_read_as_a_clock(seconds, text):
    assert format_seconds(seconds) == text
