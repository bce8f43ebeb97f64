# SPDX-License-Identifier: Apache-2.0
"""Where published weights lie in memory: a directory named by the run, so that two never meet."""

from __future__ import annotations

import shutil
from pathlib import Path

MEMORY = Path("/dev/shm")


def memory_directory(run_id: str) -> Path | None:
    """None where the machine has no memory-backed directory."""
    return MEMORY / f"relax-{run_id}" if MEMORY.is_dir() else None


def sweep(run_id: str) -> None:
    """What a run left there; nobody reads it after its end."""
    directory = memory_directory(run_id)
    if directory is not None:
        shutil.rmtree(directory, ignore_errors=True)
