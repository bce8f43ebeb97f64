# SPDX-License-Identifier: Apache-2.0
"""Memory-backed files whose pages are used again: to get fresh ones costs more than the copy into them.

What is released keeps its pages under a hidden name, and the next version is written over them, once nobody has it.
Who reads holds the file's shared lock while any view lives, who writes needs the exclusive one, and the kernel lets go
of both where a process dies. A file that is still read is removed instead: its bytes stay with the reader.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import weakref
from pathlib import Path

import numpy as np


class Maps:
    """A process's mappings of files by what they are, not by their names; each is kept until its file is gone."""

    def __init__(self, writable: bool) -> None:
        self._writable = writable
        self._kept: dict[tuple[int, int], _Kept] = {}

    def of(self, path: Path) -> _Kept:
        """The mapping of a file that is locked."""
        self._kept = {key: kept for key, kept in self._kept.items() if os.fstat(kept.fd).st_nlink}
        found = path.stat()
        key = (found.st_dev, found.st_ino)
        kept = self._kept.get(key)
        if kept is None or len(kept.map) != found.st_size:
            kept = self._kept[key] = _Kept(path, self._writable)
        return kept


class _Kept:
    """One mapping, all pages at once: one fault each would cost more than the copy."""

    def __init__(self, path: Path, writable: bool) -> None:
        self.fd = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self.fd)
        prot = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self.map = mmap.mmap(self.fd, 0, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, prot=prot)


class _Lent:
    """What numpy makes an array of; the lock goes with the last view."""

    def __init__(self, kept: _Kept, lock: int) -> None:
        weakref.finalize(self, os.close, lock)
        self._whole = np.frombuffer(kept.map, np.uint8)
        self.__array_interface__ = self._whole.__array_interface__


def lend(path: Path, maps: Maps) -> np.ndarray:
    """All bytes of a file for reading; nobody writes over them while the array or a view of it lives.

    FileNotFoundError where it was released meanwhile, whatever its pages hold now.
    """
    lock = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(lock), os.stat(path)):
            raise FileNotFoundError(errno.ENOENT, "replaced by another file", str(path))
        lent = _Lent(maps.of(path), lock)
    except BlockingIOError as error:
        os.close(lock)
        raise FileNotFoundError(errno.ENOENT, "released and written over", str(path)) from error
    except BaseException:
        os.close(lock)
        raise
    return np.asarray(lent)


class Overwritten:
    """A released file as one to write: its pages, grown or cut to what is written."""

    def __init__(self, path: Path, maps: Maps) -> None:
        """BlockingIOError where somebody reads it."""
        self._lock = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._map = maps.of(path).map
        except BaseException:
            os.close(self._lock)
            raise
        self._at = self._end = 0

    def seek(self, at: int) -> int:
        self._at = at
        return at

    def write(self, data: bytes | memoryview) -> int:
        size, end = len(data), self._at + len(data)
        if end > len(self._map):
            os.posix_fallocate(self._lock, 0, end)  # a full host says so here; a page that is lacking would kill us
            self._map.resize(end)
        np.copyto(np.frombuffer(self._map, np.uint8, size, self._at), np.frombuffer(data, np.uint8))
        self._at, self._end = end, max(end, self._end)
        return size

    def read(self, size: int) -> bytes:
        begin, self._at = self._at, self._at + size
        return self._map[begin : self._at]

    def __enter__(self) -> Overwritten:
        return self

    def __exit__(self, failed: object, *_: object) -> None:
        try:
            if not failed and self._end != len(self._map):
                self._map.resize(self._end)
        finally:
            os.close(self._lock)
