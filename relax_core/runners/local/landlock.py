# SPDX-License-Identifier: Apache-2.0
"""Landlock: a process gives up writing outside of a few folders, and reaching unconfined processes (from Linux 5.19).

No root rights are needed, and child processes inherit the restriction. Landlock can only grant rights to a folder and
all below it, without exceptions. So a folder with a closed folder in it is granted entry by entry, and a confined process
can't use new entries directly in the folders above the closed one. It can't read the memory or environment of an
unconfined process, nor send signals to it (the latter from Linux 6.12).
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
WRITE_FILE, READ_FILE, TRUNCATE = 1 << 1, 1 << 2, 1 << 14
CHANGE_FOLDER = sum(1 << bit for bit in range(4, 14))
"""Rights to remove and make files, folders, links and sockets, and to move them between folders."""
SCOPES = 0b11
"""Scopes that forbid reaching unconfined processes by abstract sockets and by signals."""
CAPABILITIES_VERSION = 0x20080522
KEPT_CAPABILITIES = (0, 1, 3, 4, 5, 6, 7, 10, 13)
"""Root's capabilities for files and processes of other users and for low ports, as containers have them. All others are
given up, such as those to mount, to make devices, to open files by handle and to read the memory of every process."""
DEVICES = ("null", "zero", "full", "random", "urandom", "tty", "ptmx", "pts", "nvidia*", "dri", "kfd")
"""Names in /dev to which every process may write: terminals and GPUs, but not disks."""


class _Ruleset(ctypes.Structure):
    _fields_ = (("files", ctypes.c_uint64), ("network", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("folder", ctypes.c_int32))


def give_up_writing(writable: Sequence[str], closed: Sequence[str] = (), unread: Sequence[str] = ()) -> bool:
    """Give up writing outside of the folders `writable` and DEVICES; return False if the kernel has no Landlock.

    All paths are absolute and without symbolic links. `closed`: folders inside of writable folders that can't be written
    unless they are also `writable`. `unread`: folders whose files can't be opened even for reading, except in `writable` and
    `closed` folders in them.
    Root's capabilities except KEPT_CAPABILITIES are given up in any case.

    The restriction holds for this thread and all threads and processes that it starts. Call this function before
    further threads start, since they would keep their rights.
    """
    libc, version = ctypes.CDLL(None, use_errno=True), landlock_version()
    _drop_capabilities(libc)
    libc.prctl(NO_NEW_PRIVS, 1, 0, 0, 0)
    if version < MIN_VERSION:
        return False
    writing = WRITE_FILE | CHANGE_FOLDER | (TRUNCATE if version >= 3 else 0)
    reading = READ_FILE if unread else 0
    ruleset = _Ruleset(writing | reading, 0, SCOPES if version >= 6 else 0)
    size = ctypes.sizeof(ruleset) if version >= 6 else 8
    rules = libc.syscall(CREATE_RULESET, ctypes.byref(ruleset), ctypes.c_size_t(size), 0)
    if rules < 0:
        return False
    devices = (str(path) for name in DEVICES for path in Path("/dev").glob(name))
    rights = dict.fromkeys(devices, writing | reading)
    rights |= {path: writing | reading for folder in writable for path in _without(folder, closed)}
    if unread:
        inside = (path for path in closed if any(path.startswith(f"{folder}/") for folder in unread))
        rights = dict.fromkeys((*_without("/", unread), *inside), reading) | rights
    try:
        for path, allowed in rights.items():
            with suppress(OSError):  # the path was deleted or can't be written anyway
                _grant(libc, rules, path, allowed)
        return not libc.syscall(RESTRICT_SELF, ctypes.c_int(rules), ctypes.c_uint32(0))
    finally:
        os.close(rules)


def landlock_version() -> int:
    """Return the kernel's version of Landlock; 0 or less without Landlock."""
    return int(ctypes.CDLL(None, use_errno=True).syscall(CREATE_RULESET, None, 0, VERSION_FLAG))


def _without(folder: str, closed: Sequence[str]) -> Iterator[str]:
    """Yield as few paths as possible that cover a folder without the folders `closed`.

    Symbolic links are left out: their targets are covered by their own paths.
    """
    inside = [path for path in closed if is_below(path, folder)]
    if not inside:
        yield folder
    elif folder not in inside:
        with suppress(OSError):
            for entry in os.scandir(folder):
                if not entry.is_symlink():
                    yield from _without(entry.path, inside)


def is_below(path: str, folder: str) -> bool:
    """Return True if a path is the folder or a path in the folder."""
    return f"{path}/".startswith(f"{folder.rstrip('/')}/")


def _drop_capabilities(libc: ctypes.CDLL) -> None:
    """Keep only KEPT_CAPABILITIES. With NO_NEW_PRIVS, programs started later can't regain the others."""
    header = (ctypes.c_uint32 * 2)(CAPABILITIES_VERSION, 0)
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable: first for capabilities 0-31, then 32-63
    kept = sum(1 << capability for capability in KEPT_CAPABILITIES)
    if libc.capget(header, sets) == 0:
        for at in range(6):
            sets[at] &= kept if at < 3 else 0
        libc.capset(header, sets)


def _grant(libc: ctypes.CDLL, rules: int, path: str, rights: int) -> None:
    opened = os.open(path, os.O_PATH | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        rule = _PathBeneath(rights if os.path.isdir(path) else rights & ~CHANGE_FOLDER, opened)
        libc.syscall(ADD_RULE, ctypes.c_int(rules), PATH_BENEATH, ctypes.byref(rule), ctypes.c_uint32(0))
    finally:
        os.close(opened)
