# SPDX-License-Identifier: Apache-2.0
"""One writer a run: a record lock that ends with its process, however that dies, and that no child inherits."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

from relax_core.api.errors import ConfigError
from relax_core.observe.document import disk_errors

_HELD = {errno.EACCES, errno.EAGAIN}
_UNSUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}


class WriterLock:
    """Held from construction to `release`; the file names the holder's process."""

    def __init__(self, path: Path) -> None:
        with disk_errors(path):
            file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        self._file: int | None = file
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _HELD:
                raise self._refusal(file, path) from error
            # A file system without locks (some network ones) leaves us as safe as the user is.
            if error.errno not in _UNSUPPORTED:
                raise
        with disk_errors(path):
            os.ftruncate(file, 0)
            os.pwrite(file, str(os.getpid()).encode(), 0)

    def release(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _refusal(self, file: int, path: Path) -> ConfigError:
        holder = os.pread(file, 32, 0).decode(errors="replace").strip() or "unknown"
        self.release()
        return ConfigError("run", f"{path.parent}, which process {holder} writes", "wait for it, or stop it first")
