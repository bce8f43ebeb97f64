# SPDX-License-Identifier: Apache-2.0
"""A filter of system calls (seccomp) for kernels without namespaces: no changes of modes, owners and attributes of files.

Landlock does not guard these. The filter holds for all files, since a filter can't read paths.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import struct

SET_SECCOMP, FILTER = 22, 2
LOAD, EQUAL, GREATER, RETURN = 0x20, 0x15, 0x25, 0x06
ALLOWED, REFUSED, ENDS = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x80000000
NEWER = (425, 452, 463, 466)
"""io_uring_setup, whose requests no filter sees, fchmodat2, setxattrat and removexattrat, on every machine."""
MACHINES = {
    "x86_64": (0xC000003E, (90, 91, 268, 92, 93, 94, 260, 188, 189, 190, 197, 198, 199)),
    "aarch64": (0xC00000B7, (52, 53, 54, 55, 5, 6, 7, 14, 15, 16)),
}
"""For each machine: its number in the filter, and its calls chmod, chown, setxattr, removexattr and their variants."""
FOREIGN = 0x3FFFFFFF
"""Calls with higher numbers are those of x86_64 with short pointers."""


def refuse_mode_changes() -> bool:
    """Refuse the calls in this thread and all that it starts; return False if the kernel or the machine has no filter.

    Call this function after `give_up_writing`, since the kernel asks for NO_NEW_PRIVS.
    """
    if platform.machine() not in MACHINES:
        return False
    code = b"".join(struct.pack("=HBBI", *instruction) for instruction in instructions(platform.machine()))
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("@HP", len(code) // 8, ctypes.addressof(buffer))
    return not ctypes.CDLL(None).prctl(SET_SECCOMP, FILTER, program, 0, 0)


def instructions(machine: str) -> list[tuple[int, int, int, int]]:
    """Return the filter as BPF instructions (code, jump if true, jump if false, value)."""
    architecture, calls = MACHINES[machine]
    tests = [(EQUAL, 0, 1, call) for call in (*calls, *NEWER)]
    refuse = (RETURN, 0, 0, REFUSED)
    return [
        (LOAD, 0, 0, 4), (EQUAL, 1, 0, architecture), (RETURN, 0, 0, ENDS), (LOAD, 0, 0, 0), (GREATER, 0, 1, FOREIGN), refuse,
        *(step for test in tests for step in (test, refuse)), (RETURN, 0, 0, ALLOWED),
    ]  # fmt: skip
