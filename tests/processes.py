# SPDX-License-Identifier: Apache-2.0
"""Processes that tests stop and end, each seen to have done so."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil

DEADLINE_S = 60.0


def stop(pid: int) -> None:
    """Send SIGSTOP and return when every thread has stopped: until then a loaded machine may still let it answer."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + DEADLINE_S
    while states := {thread for thread in _states(pid) if thread not in "TtZX"}:
        assert time.monotonic() < deadline, f"process {pid} did not stop in {DEADLINE_S:.0f} s: threads in {states}"
        time.sleep(0.001)


def gone(pid: int) -> bool:
    """Say whether it has ended, be it that nobody has asked for its exit code yet."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def kept_worker(name: str) -> int:
    """Return the newest process of this process's worker `name`, which runs authors' code, below its keeper."""
    shown = name[:15]
    named = [child for child in psutil.Process().children(recursive=True) if _name(child) == shown]
    first = [child for child in named if (parent := child.parent()) is not None and _name(parent) != shown]
    return max(first, key=lambda child: child.create_time()).children(recursive=True)[-1].pid


def _name(process: psutil.Process) -> str:
    """Return the name of a process; empty if it was reaped meanwhile, as a fork server does with ended children."""
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return ""


def _states(pid: int) -> list[str]:
    """Read the state of each thread, which follows the name in brackets."""
    return [path.read_text().rpartition(") ")[2][0] for path in Path(f"/proc/{pid}/task").glob("*/stat")]
