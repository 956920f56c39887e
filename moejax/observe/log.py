"""log.txt of a run: what was said on the terminal, and every warning of moejax, with the time.

    Progress.say, step lines --> logger "moejax.said" --+
    warnings of any module   --> logger "moejax" --------+--> run_dir/log.txt

The first logger is cut off from the root one: importing JAX and Orbax puts a handler there that would show all twice.
"""

import contextlib
import logging
import sys
from pathlib import Path
from typing import Self

from moejax.observe.append_file import write_error

FILE_NAME = "log.txt"

library = logging.getLogger("moejax")
said = logging.getLogger("moejax.said")
said.propagate = False
said.setLevel(logging.INFO)
said.addHandler(logging.NullHandler())


class RunLog(logging.FileHandler):
    """The handler that writes log.txt; also a context manager. Made by `open_log`."""

    def __init__(self, path: Path):
        super().__init__(path, encoding="utf-8", errors="replace")
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%Y-%m-%d %H:%M:%S%z"))

    def close(self) -> None:
        for logger in (library, said):
            logger.removeHandler(self)
        with contextlib.suppress(OSError):  # each line was flushed as it came: nothing new can be lost here
            super().close()

    def handleError(self, record: logging.LogRecord) -> None:
        """A log that cannot be written must not stop a run that still can save: say so once and go on without it."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):  # a message that does not fit its arguments: a fault of the caller
            super().handleError(record)
            return
        self.close()
        print(f"{self.baseFilename} cannot be written any more ({error}); the run goes on without it.", file=sys.stderr)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_log(run_dir: str | Path) -> RunLog:
    """Let run_dir/log.txt (made if absent, else continued) take part until closed. A log opened before is closed first.

    Lines: `2026-11-20 16:56:02+0000 INFO sentence`. Raises UserError if the file cannot be written.
    """
    for handler in [h for h in said.handlers if isinstance(h, RunLog)]:
        handler.close()
    path = Path(run_dir) / FILE_NAME
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        log = RunLog(path)
        _end_last_line(path)
    except OSError as error:
        raise write_error(path, error) from error
    for logger in (library, said):
        logger.addHandler(log)
    return log


def _end_last_line(path: Path) -> None:
    """A kill may have halved the last line; what follows begins a new one."""
    if not path.is_file():
        return
    with open(path, "r+b") as file:
        if file.seek(0, 2) == 0:
            return
        file.seek(-1, 2)
        if file.read(1) != b"\n":
            file.write(b"\n")
