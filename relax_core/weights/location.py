# SPDX-License-Identifier: Apache-2.0
"""Where published weights lie in memory: a directory named by the run, so that two never meet, with its owner's mark.

A run sweeps its own at its end. One that was killed leaves it behind; the next run on this machine sweeps those whose
owner is dead, and touches no directory without such a mark, of another user or of another container.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from pathlib import Path

import psutil

MEMORY = Path("/dev/shm")
PREFIX = "relax-"
OWNER = "owner.json"
REUSED_S = 10.0
"""A process that began this much apart from the owner only has its number; clocks are set by less."""


def memory_directory(run_id: str) -> Path | None:
    """None where the machine has no memory-backed directory."""
    return MEMORY / f"{PREFIX}{run_id}" if MEMORY.is_dir() else None


def claim(directory: Path) -> None:
    """Make it, and mark this process as the one whose death makes it worthless."""
    directory.mkdir(parents=True, exist_ok=True)
    mark = {"pid": os.getpid(), "began": psutil.Process().create_time(), "processes": _processes()}
    (directory / OWNER).write_text(json.dumps(mark))


def sweep(run_id: str) -> None:
    """What a run left there; nobody reads it after its end."""
    directory = memory_directory(run_id)
    if directory is not None:
        shutil.rmtree(directory, ignore_errors=True)


def sweep_abandoned(memory: Path = MEMORY) -> list[str]:
    """Remove what killed runs left; returns the names."""
    found = [path for path in memory.glob(f"{PREFIX}*") if _abandoned(path)]
    for path in found:
        shutil.rmtree(path, ignore_errors=True)
    return [path.name for path in found]


def _abandoned(directory: Path) -> bool:
    try:
        owner = json.loads((directory / OWNER).read_text())
        if directory.stat().st_uid != os.getuid() or owner["processes"] != _processes():
            return False
        return abs(psutil.Process(owner["pid"]).create_time() - float(owner["began"])) > REUSED_S
    except psutil.NoSuchProcess:
        return True
    except (OSError, ValueError, KeyError, TypeError, psutil.Error):
        return False


def _processes() -> str:
    """Which table of processes a pid belongs to: containers have their own."""
    with contextlib.suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return ""
