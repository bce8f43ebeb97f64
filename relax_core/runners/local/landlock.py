# SPDX-License-Identifier: Apache-2.0
"""Landlock: a process gives up its rights to write below a folder and to reach unconfined processes (from Linux 5.19).

No root rights are needed, and child processes inherit the restriction. Landlock can only grant rights to a folder and
all below it, without exceptions. So rights are granted to every neighbour of the protected folder and of the folders
above it. A confined process can't make new entries directly in the folders above. It can't read the
memory or environment of an unconfined process, nor send signals to it (the latter from Linux 6.12).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
VERSION_FLAG, PATH_BENEATH, NO_NEW_PRIVS = 1, 1, 38
MIN_VERSION = 2
"""Oldest supported version: version 1 forbids every rename from one folder to another."""
WRITE_FILE, TRUNCATE = 1 << 1, 1 << 14
CHANGE_FOLDER = sum(1 << bit for bit in range(4, 14))
"""Rights to remove and make files, folders, links and sockets, and to move them between folders."""
SCOPES = 0b11
"""Scopes that forbid reaching unconfined processes by abstract sockets and by signals."""
CAPABILITIES_VERSION = 0x20080522
READS_OTHERS = (19, 21, 38)
"""Capabilities (tracing, administration, performance) of root and in a user namespace: with them a process reads the
environment of every process, or uncovers the /proc below the one of its process namespace."""


class _Ruleset(ctypes.Structure):
    _fields_ = (("files", ctypes.c_uint64), ("network", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("folder", ctypes.c_int32))


def give_up_writing(protected: Path | None, writable: Sequence[Path] = ()) -> bool:
    """Give up writing below `protected`, except in `writable`; return False if the kernel has no Landlock.

    Root's capabilities READS_OTHERS are given up in any case.

    The restriction holds for this thread and all threads and processes that it starts. Call this function before
    further threads start, since they would keep their rights.
    """
    libc, version = ctypes.CDLL(None, use_errno=True), landlock_version()
    _drop_capabilities(libc)
    libc.prctl(NO_NEW_PRIVS, 1, 0, 0, 0)
    if version < MIN_VERSION:
        return False
    file_rights = WRITE_FILE | (TRUNCATE if version >= 3 else 0)
    ruleset = _Ruleset(file_rights | CHANGE_FOLDER, 0, SCOPES if version >= 6 else 0)
    size = ctypes.sizeof(ruleset) if version >= 6 else 8
    rules = libc.syscall(CREATE_RULESET, ctypes.byref(ruleset), ctypes.c_size_t(size), 0)
    if rules < 0:
        return False
    try:
        for path in (*_outside(protected), *writable):
            with suppress(OSError):  # the path was deleted or can't be written anyway
                _grant(libc, rules, path, file_rights)
        return not libc.syscall(RESTRICT_SELF, ctypes.c_int(rules), ctypes.c_uint32(0))
    finally:
        os.close(rules)


def landlock_version() -> int:
    """Return the kernel's version of Landlock; 0 or less without Landlock."""
    return int(ctypes.CDLL(None, use_errno=True).syscall(CREATE_RULESET, None, 0, VERSION_FLAG))


def _outside(protected: Path | None) -> Iterator[Path]:
    """Yield as few paths as possible that cover everything outside of `protected`; `/` for None.

    Symbolic links are left out: their targets are covered by their own paths.
    """
    if protected is None:
        yield Path("/")
        return
    real = protected.resolve()
    for below in (*reversed(real.parents), real)[1:]:
        with suppress(OSError):
            for entry in os.scandir(below.parent):
                if entry.name != below.name and not entry.is_symlink():
                    yield Path(entry.path)


def _drop_capabilities(libc: ctypes.CDLL) -> None:
    """Give up root's capabilities READS_OTHERS. With NO_NEW_PRIVS, programs started later can't regain them."""
    header = (ctypes.c_uint32 * 2)(CAPABILITIES_VERSION, 0)
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable: first for capabilities 0-31, then 32-63
    if libc.capget(header, sets) == 0:
        for capability in READS_OTHERS:
            word, bit = divmod(capability, 32)
            for at in range(3 * word, 3 * word + 3):
                sets[at] &= ~(1 << bit)
        libc.capset(header, sets)


def _grant(libc: ctypes.CDLL, rules: int, path: Path, file_rights: int) -> None:
    folder = os.open(path, os.O_PATH | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        rights = file_rights | CHANGE_FOLDER if path.is_dir() else file_rights
        rule = _PathBeneath(rights, folder)
        libc.syscall(ADD_RULE, ctypes.c_int(rules), PATH_BENEATH, ctypes.byref(rule), ctypes.c_uint32(0))
    finally:
        os.close(folder)
