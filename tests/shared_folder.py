# SPDX-License-Identifier: Apache-2.0
"""Folders that are expensive to make and only read: made once for all processes of a test session."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest


def shared_folder(factory: pytest.TempPathFactory, name: str, build: Callable[[Path], object]) -> Path:
    """Return the session's folder of this name; the first process that asks builds it while others wait at its lock."""
    base = factory.getbasetemp()
    if "RELAX_TEST_PROCESS" in os.environ:
        base = base.parent  # the base of a forked process lies in the session's
    folder, finished = base / name, base / f"{name}.finished"
    with (base / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not finished.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            build(folder)
            finished.touch()
    return folder
