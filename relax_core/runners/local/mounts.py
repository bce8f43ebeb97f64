# SPDX-License-Identifier: Apache-2.0
"""The file tree that authors' code sees in a mount namespace: read-only except for a few folders, without the run directory.

A read-only mount also refuses changes of modes, owners and attributes, which Landlock does not. Devices stay usable. The
caller must give up the capability CAP_SYS_ADMIN; in further namespaces the kernel locks these mounts.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from itertools import chain

NEW_MOUNTS = 0x00020000
SLAVE = 1 << 14 | 1 << 19
"""Mount flags: all mounts keep receiving mounts of the machine but send none back."""
NO_PROGRAMS = 2 | 4 | 8
"""Mount flags: no setuid programs, no devices, no programs."""
OPEN_TREE, MOVE_MOUNT, MOUNT_SETATTR = 428, 429, 442
HERE, CLONE, FROM_DESCRIPTOR, RECURSIVE = -100, 1, 4, 0x8000
OF_DESCRIPTOR = 0x1000
MEMORY = "/dev/shm"
"""Folder of shared memory. Authors' code gets an empty folder of its own, since the run's weights may be in this one."""

libc = ctypes.CDLL(None, use_errno=True)


def enter_mounts(writable: Sequence[str] = (), closed: Sequence[str] = (), hidden: Sequence[str] = ()) -> None:
    """Enter a mount namespace in which only the folders `writable` can be changed. Raises OSError.

    All paths are absolute and without symbolic links. `/` in `writable`: the whole tree. `closed`: folders inside of
    writable folders that are read-only. `hidden`: folders that are replaced by empty ones, except for `writable` and
    `closed` folders in them. The longest path decides.
    """
    check("unshare", libc.unshare(NEW_MOUNTS))
    check("mount /", libc.mount(None, b"/", None, ctypes.c_ulong(SLAVE), None))
    check("mount /proc", libc.mount(b"proc", b"/proc", b"proc", ctypes.c_ulong(NO_PROGRAMS), None))
    copies = [(path, _copy(path)) for path in dict.fromkeys(writable) if path != "/"]
    for path in closed:
        copies.append((path, _copy(path)))
        _make_read_only(copies[-1][1], "", OF_DESCRIPTOR | RECURSIVE)
    if "/" not in writable:
        _make_read_only(HERE, "/", RECURSIVE)
    empty = [(path, None) for path in (MEMORY, *hidden) if os.path.isdir(path)]
    places = sorted(chain(copies, empty), key=lambda place: place[0].count("/"))
    for path, copied in places:
        if copied is not None:
            moved = libc.syscall(MOVE_MOUNT, copied, b"", HERE, path.encode(), FROM_DESCRIPTOR)
            check(f"move_mount {path}", moved)
            os.close(copied)
            continue
        mounted = libc.mount(b"tmpfs", path.encode(), b"tmpfs", ctypes.c_ulong(NO_PROGRAMS), b"mode=700")
        check(f"mount {path}", mounted)
        for inner, _ in places:
            if inner.startswith(f"{path}/"):
                os.makedirs(inner, exist_ok=True)
    for path, _ in empty:
        if path in hidden:
            _make_read_only(HERE, path, 0)


def check(what: str, answer: int) -> int:
    """Return the answer of a system call. Raises OSError naming the call `what` if the call failed."""
    if answer < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return answer


def _copy(path: str) -> int:
    """Return a descriptor of a copy of all mounts below a folder, with their present flags."""
    flags = CLONE | RECURSIVE | os.O_CLOEXEC
    return check(f"open_tree {path}", libc.syscall(OPEN_TREE, HERE, path.encode(), flags))


def _make_read_only(descriptor: int, path: str, flags: int) -> None:
    attributes = (ctypes.c_uint64 * 4)(1)  # sets MOUNT_ATTR_RDONLY
    answer = libc.syscall(MOUNT_SETATTR, descriptor, path.encode(), flags, attributes, ctypes.c_size_t(32))
    check(f"mount_setattr {path}", answer)
