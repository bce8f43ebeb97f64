# SPDX-License-Identifier: Apache-2.0
"""Memory that the C library keeps though nothing of the process is in it: given back to the system, where glibc is the library.

It knows nothing of tensors.
"""

from __future__ import annotations

import ctypes
import platform


def trim() -> None:
    """Free pages leave the process; elsewhere than on glibc nothing happens."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)
