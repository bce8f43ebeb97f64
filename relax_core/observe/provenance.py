# SPDX-License-Identifier: Apache-2.0
"""Origin of a run: time, source revision, interpreter, packages, machine. No environment variables, no secrets.

No library is imported for this: versions come from package metadata, and GPU models from files of the NVIDIA driver.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from datetime import datetime
from importlib import metadata
from pathlib import Path

import psutil

from relax_core.registry.installed import header

_GIT_S = 5.0
_GPUS = Path("/proc/driver/nvidia/gpus")


def provenance(directory: Path, arguments: Sequence[str] = ()) -> dict[str, object]:
    """Return the content of `provenance.json`; `directory` holds the user's files."""
    return {
        "began": datetime.now().isoformat(timespec="seconds"),
        "git": git_state(directory),
        "python": {"version": platform.python_version(), "implementation": platform.python_implementation()},
        "packages": packages(),
        "hardware": hardware(),
        "arguments": list(arguments),
    }


def git_state(directory: Path) -> dict[str, object] | None:
    """Return the commit and a flag for changed tracked files; None outside a repository or without git."""
    commit = _git(directory, "rev-parse", "HEAD")
    if commit is None:
        return None
    changes = _git(directory, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "dirty": bool(changes) if changes is not None else None}


def packages() -> dict[str, str]:
    """Return the installed distributions and their versions."""
    described = map(header, metadata.distributions())
    found = {own["Name"]: own["Version"] for own in described if own["Name"]}
    return dict(sorted(found.items(), key=lambda item: item[0].lower()))


def hardware() -> dict[str, object]:
    """Describe the machine's hardware and system, without its name or address."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    files = [card / "information" for card in sorted(_GPUS.iterdir())] if _GPUS.is_dir() else []
    cards = [line for file in files for line in file.read_text(encoding="utf-8", errors="replace").splitlines()]
    return {
        "system": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(),
        "processor": names[0] if names else platform.processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": [line.partition(":")[2].strip() for line in cards if line.startswith("Model")],
        "byte_order": sys.byteorder,
    }


def _git(directory: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(directory), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
