# SPDX-License-Identifier: Apache-2.0
"""Paths that programs in a box may read: the system's programs and libraries, and a Python interpreter."""

from __future__ import annotations

import os
from pathlib import Path

SYSTEM = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
"""Folders next to /usr; on most systems they are links into /usr."""
SETTINGS = ("/etc/alternatives", "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d")
"""The only paths of /etc in a box, which compilers and the dynamic loader read."""


def system_paths() -> list[str]:
    """Return the system's paths that exist on this machine."""
    return [path for path in ("/usr", *SYSTEM, *SETTINGS) if os.path.exists(path)]


def interpreter_folders(python: str) -> list[str]:
    """Return the folders of an interpreter: first its virtual environment if it has one, then its installation."""
    prefix = Path(python).parents[1]
    settings = prefix / "pyvenv.cfg"
    found = [str(prefix)]
    if settings.is_file():
        home = next((line.partition("=")[2].strip() for line in settings.read_text().splitlines()
                     if line.partition("=")[0].strip() == "home"), "")  # fmt: skip
        found += [str(Path(home).resolve().parent)] if home else []
    return found
