# SPDX-License-Identifier: Apache-2.0
"""One line of the doctor's, and how other processes are asked for it. What is looked at is in the modules beside this."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass

PROBE_S = 120.0
SETUP, MACHINE = 2, 4
"""Exit codes: the installation or the configuration; the machine."""


@dataclass(frozen=True, slots=True)
class Finding:
    """It is well, or what is wrong and what to do."""

    name: str
    detail: str
    fix: str = ""
    exit_code: int = 0
    """0 where it is well."""

    @property
    def line(self) -> str:
        mark = "problem" if self.exit_code else "ok"
        return f"{mark:<8} {self.name:<14} {self.detail}{f'; {self.fix}' if self.fix else ''}"


def probe(executable: str, script: str, *arguments: str) -> tuple[str, str]:
    """(what it printed, why it failed) of a few lines of Python in a process of its own."""
    command = [executable, "-c", script, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", f"{type(error).__name__}: {error}"
    if done.returncode:
        return "", (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
    return done.stdout.strip().splitlines()[-1], ""
