# SPDX-License-Identifier: Apache-2.0
"""A terminal with `relax` in its foreground, for what is shown to people and asked of them."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import time
from pathlib import Path

from tests.graph.conftest import command, environment

DEADLINE_S = 300.0
ON_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
)


class Terminal:
    """A terminal with `relax` in its foreground."""

    def __init__(self, directory: Path, *words: str | Path, **env: str) -> None:
        self._keyboard, screen = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", ON_TERMINAL, *command(*words)], cwd=directory, env=environment(**env),
            stdin=screen, stdout=screen, stderr=screen, start_new_session=True,
        )  # fmt: skip
        os.close(screen)
        self.shown = ""

    def shows(self, text: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while text not in self.shown:
            assert time.monotonic() < deadline, self.shown
            self.shown += os.read(self._keyboard, 4096).decode(errors="replace")

    def types(self, text: str) -> None:
        os.write(self._keyboard, text.encode())

    def ends(self) -> int:
        try:
            while piece := os.read(self._keyboard, 4096):
                self.shown += piece.decode(errors="replace")
        except OSError:  # nobody has it open any more
            pass
        os.close(self._keyboard)
        return self.process.wait(DEADLINE_S)
