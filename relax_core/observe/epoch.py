# SPDX-License-Identifier: Apache-2.0
"""The epoch of a run: the number of its starts, and a fence that keeps processes of earlier starts off its files.

A process of an earlier start may survive on a disconnected node or a suspended machine, and continue after
`relax resume` has started the run again. Names of a run's resources outside its directory contain the epoch. Inside the
directory, a process creates or removes files only while it holds the newest epoch. Of the processes of this machine, a
lock admits one writer.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Self

from relax_core.api.errors import ConfigError, InfrastructureError
from relax_core.observe.files import disk_errors

FILE = ".epoch"
WIDTH = 12
"""Digits in the file; the fixed width lets a new number overwrite the old one in place."""
WAIT_S, PAUSE_S = 30.0, 0.05
"""Longest wait for processes that hold the lock, and the pause between two attempts; a lock is held for an instant."""


@dataclass(frozen=True, slots=True)
class RunEpoch:
    """One start of a run: `begin -> hold for each change of a file -> ended by the next begin`.

    Invariants:
    - Numbers increase; the first is 1.
    - No epoch begins while a process holds an earlier epoch. Once an epoch has begun, no earlier epoch can be held.
    """

    file: str
    number: int

    @classmethod
    def begin(cls, run_dir: Path) -> Self:
        """Begin the next epoch of a run. Raises InfrastructureError if a process holds the last epoch too long."""
        path = run_dir / FILE
        with (
            disk_errors(path),
            os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "r+", encoding="ascii", errors="replace") as file,
        ):
            _lock(file, path, fcntl.LOCK_EX)
            number = _read(file, path) + 1
            os.pwrite(file.fileno(), f"{number:0{WIDTH}d}".encode(), 0)
            os.fsync(file.fileno())
        return cls(str(path), number)

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Prevent a later epoch from beginning inside this context. Raises InfrastructureError if one has begun."""
        path = Path(self.file)
        with disk_errors(path):
            file = path.open(encoding="ascii", errors="replace")
        with file:
            _lock(file, path, fcntl.LOCK_SH)
            if (newest := _read(file, path)) != self.number:
                raise InfrastructureError(
                    f"{path.parent}: the run was started again (start {newest}); this process belongs to start "
                    f"{self.number} and may no longer change its files"
                )
            yield


def _lock(file: IO[str], path: Path, kind: int) -> None:
    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise InfrastructureError(
                    f"{path}: another process has been changing files of this run for {WAIT_S:.0f} s; find it with "
                    "`fuser`, end it, then try again"
                ) from None
            time.sleep(PAUSE_S)


def _read(file: IO[str], path: Path) -> int:
    text = file.read(4 * WIDTH).strip("\0 \n")
    if text and not (text.isascii() and text.isdecimal()):
        raise InfrastructureError(
            f"{path}: {text[:20]!r} is not a start counter; delete the file if no process of this run is alive"
        )
    return int(text or 0)


_HELD = {errno.EACCES, errno.EAGAIN}
_UNSUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}


class WriterLock:
    """An exclusive lock on a run for its one writer, held from construction to `release`.

    The lock file contains the holder's process id. The lock ends with the process, and children do not inherit it.
    Raises ConfigError naming the holder if another process has the lock.
    """

    def __init__(self, path: Path) -> None:
        with disk_errors(path):
            file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        self._file: int | None = file
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _HELD:
                holder = os.pread(file, 32, 0).decode(errors="replace").strip() or "unknown"
                self.release()
                raise ConfigError(
                    "run", f"{path.parent}, which process {holder} writes", "wait for it, or stop it first"
                ) from error
            # Some network file systems have no locks: on these the user must not start two writers.
            if error.errno not in _UNSUPPORTED:
                raise
        with disk_errors(path):
            os.ftruncate(file, 0)
            os.pwrite(file, str(os.getpid()).encode(), 0)

    def release(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None
