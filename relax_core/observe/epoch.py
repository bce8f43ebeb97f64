# SPDX-License-Identifier: Apache-2.0
"""The epoch of a run: the number of times it was started, and the fence that keeps earlier starts off its files.

A process of an earlier start may live on, on a node that was cut off or a machine that was suspended, and wake up after
`relax resume` has started the run again. Whatever a run has outside its directory carries the epoch in its name; inside,
a file appears or goes only while its writer holds the newest epoch.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Self

from relax_core.api.errors import InfrastructureError
from relax_core.observe.documents import disk_errors

FILE = ".epoch"
WIDTH = 12
"""Digits in the file: a number is written over the last one in place, and never leaves the file shorter."""
WAIT_S, PAUSE_S = 30.0, 0.05
"""For processes that are changing a file of the run right now; each does so for an instant."""


@dataclass(frozen=True, slots=True)
class RunEpoch:
    """One start of a run: `begun -> held for each change of a file -> ended by the next one that begins`.

    Invariants:
    - Numbers only go up; the first is 1.
    - While one process holds an epoch, no later one begins; once it has begun, no earlier one can be held.
    """

    file: str
    number: int

    @classmethod
    def begin(cls, run_dir: Path) -> Self:
        """Begin the next epoch of a run. InfrastructureError where a process holds the last one for very long."""
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
        """Keep later epochs from beginning while files of the run change. InfrastructureError where one has begun."""
        path = Path(self.file)
        with disk_errors(path):
            file = path.open(encoding="ascii", errors="replace")
        with file:
            _lock(file, path, fcntl.LOCK_SH)
            if (newest := _read(file, path)) != self.number:
                raise InfrastructureError(
                    f"{path.parent}: the run was started again (start {newest}); this process belongs to start "
                    f"{self.number} and changes nothing of it any more"
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
                    f"{path}: another process has been changing files of this run for {WAIT_S:.0f} s; end it "
                    "(`fuser` names it), then try again"
                ) from None
            time.sleep(PAUSE_S)


def _read(file: IO[str], path: Path) -> int:
    text = file.read(4 * WIDTH).strip("\0 \n")
    if text and not (text.isascii() and text.isdecimal()):
        raise InfrastructureError(
            f"{path}: {text[:20]!r} is no number of starts; remove the file where no process runs"
        )
    return int(text or 0)
