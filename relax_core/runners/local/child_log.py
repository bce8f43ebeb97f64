# SPDX-License-Identifier: Apache-2.0
"""The log of a child process: its stdout and stderr, copied line by line into files that only the user can read.

`NAME.log` is the output as text. `NAME.jsonl` has the same as records with time and level, for `relax logs`. Secrets are
removed and control characters are escaped, so the files are safe to read. A thread copies the output, so that a busy
event loop does not block the child.
"""

from __future__ import annotations

import fcntl
import os
import select
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from relax_core.api.errors import printable
from relax_core.observe.process_log import SUFFIX, ProcessLog
from relax_core.observe.redaction import Redactor

PIPE_BYTES = 1 << 20
LONGEST_LINE = 1 << 18
"""Bytes after which an unfinished line is written; a record is shorter."""
IDLE_MS = 1000
"""Milliseconds after which an unfinished line is written, so that the log is complete when the process hangs."""


class ChildLog:
    """A pipe that a child writes to, and the thread that copies it: `open -> the child ends -> closed`.

    Invariants:
    - The pipe is read until no process has it open, even if the files can't be written.
    """

    def __init__(self, path: Path, redactor: Redactor, about: Mapping[str, Any]) -> None:
        """`about`: fields of every record, besides the name of the process."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        os.fchmod(self._file, 0o600)  # an earlier run may have left it readable for all
        self._redactor, self._name = redactor, path.name
        self.records = ProcessLog(path.with_name(path.stem + SUFFIX), redactor, {**about, "process": path.stem})
        self._reads, self.writes = os.pipe()
        """`writes` is the child's end; the parent closes it once the child has started."""
        with suppress(OSError):
            fcntl.fcntl(self._reads, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self._thread = threading.Thread(target=self._copy, daemon=True, name=f"log of {path.stem}")
        self._thread.start()

    def started(self, pid: int) -> None:
        """Record the start of the process, and the file of its output."""
        self.records.append({"level": "info", "pid": pid, "message": f"process {pid} starts; output: {self._name}"})

    def join(self, timeout_s: float) -> None:
        """Wait until all output is in the files."""
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
            self.records.close()

    def _write(self, data: bytes) -> None:
        text = printable(self.records.output(self._redactor.text(data.decode(errors="replace"))))
        with suppress(OSError):  # a full disk must not block the child
            os.write(self._file, text.encode(errors="backslashreplace"))
