"""A file that grows by whole records, each handed to the system in one go, and sentences for a disk that refuses.

record: bytes --append--> file        a SIGKILL may leave half of the last record, a full disk leaves none of it
"""

import contextlib
import errno
import os
from pathlib import Path

from moejax.errors import UserError


def write_error(path: str | Path, error: OSError) -> UserError:
    """The sentence for a path that cannot be written: full disk, quota, read-only or missing rights, anything else."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return UserError(
            f"No room is left on the disk that holds {path}; free some and give the same command again: it resumes."
        )
    reason = (error.strerror or str(error)).lower()
    return UserError(
        f"{path} cannot be written ({reason}); make it writable or choose another folder with run.dir=FOLDER."
    )


class AppendFile:
    """Appends records to `path` (made if absent), without a buffer of our own: what was appended outlives the process.

    A record that does not fit is taken back, so that the file still ends with a whole one. Raises UserError when the
    path cannot be opened or written.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        try:
            self._descriptor: int | None = os.open(
                self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_CLOEXEC", 0), 0o666
            )
        except OSError as error:
            raise write_error(self.path, error) from error

    def append(self, record: bytes) -> None:
        if self._descriptor is None:
            raise ValueError(f"{self.path} is closed.")
        start = os.fstat(self._descriptor).st_size
        rest = memoryview(record)
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, start)
            raise write_error(self.path, error) from error

    def close(self) -> None:
        """Safe to call twice. Network file systems report a full disk here."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            try:
                os.close(descriptor)
            except OSError as error:
                raise write_error(self.path, error) from error
