# SPDX-License-Identifier: Apache-2.0
"""Paths of the machine that programs in a box may read: the system's programs and libraries, and an interpreter."""

from __future__ import annotations

import os
from pathlib import Path

SYSTEM = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
"""Folders beside /usr, most of them links into it."""
SETTINGS = ("/etc/alternatives", "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d")
"""What compilers and the loader read; nothing else of /etc is in a box."""


def system_paths() -> list[str]:
    """List those that this machine has."""
    return [path for path in ("/usr", *SYSTEM, *SETTINGS) if os.path.exists(path)]


def interpreter_folders(python: str) -> list[str]:
    """List the folders that an interpreter lives in: its installation, or that and its virtual environment."""
    prefix = Path(python).parents[1]
    settings = prefix / "pyvenv.cfg"
    found = [str(prefix)]
    if settings.is_file():
        home = next((line.partition("=")[2].strip() for line in settings.read_text().splitlines()
                     if line.partition("=")[0].strip() == "home"), "")  # fmt: skip
        found += [str(Path(home).resolve().parent)] if home else []
    return found
