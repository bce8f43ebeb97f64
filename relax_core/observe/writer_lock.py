# SPDX-License-Identifier: Apache-2.0
"""The lock of a run directory's one writing process."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

from relax_core.api.errors import ConfigError
from relax_core.observe.files import disk_errors

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
