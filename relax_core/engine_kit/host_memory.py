# SPDX-License-Identifier: Apache-2.0
"""Memory of the host that a process holds without using it."""

from __future__ import annotations

import ctypes
import platform


def trim() -> None:
    """Return malloc's free pages to the system. Does nothing without glibc."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)
