# SPDX-License-Identifier: Apache-2.0
"""The log of a child process: its stdout and stderr, copied line by line into a file that only the user can read.

Secrets are removed and control characters are escaped, so the file is safe to read. A thread copies the output, so that
a busy event loop does not block the child.
"""

from __future__ import annotations

import fcntl
import os
import select
import threading
from contextlib import suppress
from pathlib import Path

from relax_core.api.errors import printable
from relax_core.observe.redaction import Redactor

PIPE_BYTES = 1 << 20
LONGEST_LINE = 1 << 16
IDLE_MS = 1000
"""Milliseconds after which an unfinished line is written, so that the log is complete when the process hangs."""


class ChildLog:
    """A pipe that a child writes to, and the thread that copies it: `open -> the child ends -> closed`.

    Invariants:
    - The pipe is read until no process has it open, even if the file can't be written.
    """

    def __init__(self, path: Path, redactor: Redactor) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        os.fchmod(self._file, 0o600)  # an earlier run may have left it readable for all
        self._redactor = redactor
        self._reads, self.writes = os.pipe()
        """`writes` is the child's end; the parent closes it once the child has started."""
        with suppress(OSError):
            fcntl.fcntl(self._reads, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self._thread = threading.Thread(target=self._copy, daemon=True, name=f"log of {path.stem}")
        self._thread.start()

    def join(self, timeout_s: float) -> None:
        """Wait until all output is in the file."""
        self._thread.join(timeout_s)

    def _copy(self) -> None:
        rest, poll = b"", select.poll()
        poll.register(self._reads, select.POLLIN)
        try:
            while True:
                if rest and not poll.poll(IDLE_MS):
                    self._write(rest)
                    rest = b""
                data = os.read(self._reads, PIPE_BYTES)
                if not data:
                    break
                whole, end, rest = (rest + data).replace(b"\r", b"\n").rpartition(b"\n")
                self._write(whole + end)
                if len(rest) > LONGEST_LINE:
                    self._write(rest)
                    rest = b""
            self._write(rest)
        finally:
            os.close(self._reads)
            os.close(self._file)

    def _write(self, data: bytes) -> None:
        text = printable(self._redactor.text(data.decode(errors="replace")))
        with suppress(OSError):  # a full disk must not block the child
            os.write(self._file, text.encode())
