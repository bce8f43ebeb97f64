# SPDX-License-Identifier: Apache-2.0
"""Processes that tests stop and end, each seen to have done so."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
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
    keepers: list[psutil.Process] = []
    for child in named(name):
        with suppress(psutil.NoSuchProcess):
            if (parent := child.parent()) is not None and parent.name() != child.name():
                keepers.append(child)
    return max(keepers, key=lambda keeper: keeper.create_time()).children(recursive=True)[-1].pid


def named(*names: str) -> list[psutil.Process]:
    """Return the processes below this one that have one of these names, of which the system shows 15 characters.

    Processes that end while this looks at them are left out.
    """
    shown, found = [name[:15] for name in names], []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if process.name() in shown and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def _states(pid: int) -> list[str]:
    """Read the state of each thread, which follows the name in brackets."""
    states = []
    for path in Path(f"/proc/{pid}/task").glob("*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread ended meanwhile
            states.append(path.read_text().rpartition(") ")[2][0])
    return states
