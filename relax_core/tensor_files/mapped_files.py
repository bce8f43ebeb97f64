# SPDX-License-Identifier: Apache-2.0
"""Memory-backed files: files with reused pages, files without a name, and the directories of runs.

Allocating pages costs more than copying data into them. So a released file keeps its pages under a hidden name, and the
next version is written over them once no process reads them. A reader holds the file's shared lock while any view
lives, and a writer needs the exclusive lock. The kernel releases both locks when their process dies. If a process still
reads a released file, the file is removed instead, and its bytes are freed with the last reader.

A run deletes its directory at its end. The next run on the machine deletes the directory of a killed run, recognized by
the mark of its dead owner. Directories without such a mark, of another user or of another container are left alone.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import mmap
import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

import numpy as np
import psutil

from relax_core.api.errors import InfrastructureError

_COPY_BYTES = 1 << 24


class MappingCache:
    """The file mappings of a process, by inode and not by name. A mapping is kept until its file has no name left."""

    def __init__(self, writable: bool) -> None:
        self._writable = writable
        self._mappings: dict[tuple[int, int], _Mapping] = {}

    def of(self, path: Path) -> _Mapping:
        """Return the mapping of a locked file."""
        self._mappings = {key: known for key, known in self._mappings.items() if os.fstat(known.fd).st_nlink}
        found = path.stat()
        key = (found.st_dev, found.st_ino)
        mapping = self._mappings.get(key)
        if mapping is None or len(mapping.map) != found.st_size:
            mapping = self._mappings[key] = _Mapping(path, self._writable)
        return mapping


class _Mapping:
    """A mapping whose pages are all mapped at once, because one page fault per page would cost more than copying."""

    def __init__(self, path: Path, writable: bool) -> None:
        self.fd = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self.fd)
        prot = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self.map = mmap.mmap(self.fd, 0, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, prot=prot)


class _LockedView:
    """The buffer under an array of `lend`; its lock is released with the last view."""

    def __init__(self, mapping: _Mapping, lock: int) -> None:
        weakref.finalize(self, os.close, lock)
        self._whole = np.frombuffer(mapping.map, np.uint8)
        self.__array_interface__ = self._whole.__array_interface__


def lend(path: Path, mappings: MappingCache) -> np.ndarray:
    """Return all bytes of a file for reading. No process overwrites them while the array or a view of the array lives.

    Raises FileNotFoundError if the file was released meanwhile, even if its pages were reused.
    """
    lock = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(lock), os.stat(path)):
            raise FileNotFoundError(errno.ENOENT, "replaced by another file", str(path))
        lent = _LockedView(mappings.of(path), lock)
    except BlockingIOError as error:
        os.close(lock)
        raise FileNotFoundError(errno.ENOENT, "released and written over", str(path)) from error
    except BaseException:
        os.close(lock)
        raise
    return np.asarray(lent)


class Overwritten:
    """A released file opened for writing: its pages are reused, and grown or cut to the size of the new data."""

    def __init__(self, path: Path, mappings: MappingCache) -> None:
        """Lock the file. Raises BlockingIOError if a process reads it."""
        self._lock = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._map = mappings.of(path).map
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
            os.posix_fallocate(
                self._lock, 0, end
            )  # raises on a full host; writing to a missing page would kill the process
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


def write_whole(path: Path, partial: Path, parts: Iterable[bytes | memoryview], durable: bool = False) -> None:
    """Write parts to a file atomically; `partial` is the path of the unfinished file.

    A failed write leaves no unfinished file. A `durable` file is on the disk at return, so that it survives a power
    cut.
    """
    try:
        with partial.open("wb") as file:
            file.writelines(parts)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        partial.rename(path)
        if durable:
            folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
    except BaseException:
        with contextlib.suppress(OSError):  # raise the first error instead
            partial.unlink(missing_ok=True)
        raise


def read_or_map(path: str | Path, mapped_bytes: int) -> bytes | mmap.mmap:
    """Return all bytes of a file: mapped if it has `mapped_bytes` or more, else read, which is cheaper if small."""
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        size = os.fstat(file).st_size
        if size < mapped_bytes:
            return os.read(file, size)
        return mmap.mmap(file, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    finally:
        os.close(file)


def anonymous_file(directory: str) -> IO[bytes]:
    """Open a nameless file in a directory, by default in the temporary directory. Raises InfrastructureError."""
    try:
        if directory:
            Path(directory).mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryFile(prefix="relax-weights-", dir=directory or None)
    except OSError as error:
        where = directory or "the temporary directory"
        raise InfrastructureError(f"weights: can't keep a delta's base in {where}: {error.strerror}") from error


def private_mapping(path: Path) -> np.ndarray:
    """Map all bytes of a memory-backed file, copy-on-write: the file keeps its bytes when the array is changed.

    No process writes over the file while the array lives, because the mapping holds its shared lock.
    """
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return np.memmap(file, dtype=np.uint8, mode="c")


def copied_mapping(path: Path, directory: Path) -> np.ndarray:
    """Map a nameless copy of a file in `directory`; its pages are backed by disk, so changed pages can leave memory."""
    with path.open("rb") as file, anonymous_file(str(directory)) as copy:
        shutil.copyfileobj(file, copy, _COPY_BYTES)
        copy.flush()
        return np.memmap(copy, dtype=np.uint8, mode="r+")


MEMORY = Path("/dev/shm")
PREFIX = "relax-"
OWNER = "owner.json"
WEIGHTS = "weights"
"""Folder of a run's directory for versions that are published on disk."""
REUSED_S = 10.0
"""Seconds by which a process's start time may differ from its mark, because clocks are corrected. A larger difference
means that another process has the pid."""


def memory_directory(run_id: str) -> Path | None:
    """Return a run's directory in memory; None if the machine has no memory-backed directory."""
    return MEMORY / f"{PREFIX}{run_id}" if MEMORY.is_dir() else None


def claim(directory: Path, successor_s: float = 0.0) -> None:
    """Create a directory and mark this process as its owner, unless a living process owns it.

    After the owner's death the directory may be deleted, but not until `successor_s` seconds after its last change, so
    that a successor can take it over.
    """
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, psutil.Error):
        owner = json.loads((directory / OWNER).read_text())
        if owner["processes"] == _processes() and _lives(owner):
            return
    directory.mkdir(parents=True, exist_ok=True)
    mark = {"pid": os.getpid(), "began": psutil.Process().create_time(), "processes": _processes()}
    mark["successor_s"] = successor_s
    (directory / OWNER).write_text(json.dumps(mark))


def sweep(run_id: str) -> None:
    """Delete a run's directory in memory. Call this at the run's end, when no process reads the files any more."""
    directory = memory_directory(run_id)
    if directory is not None:
        shutil.rmtree(directory, ignore_errors=True)


def sweep_published(run_dir: str | Path) -> None:
    """Delete the versions that a run has published on disk. None of the run's roles may be running."""
    shutil.rmtree(Path(run_dir) / WEIGHTS, ignore_errors=True)


def sweep_abandoned(memory: Path = MEMORY) -> list[str]:
    """Delete the directories of killed runs; return their names."""
    found = [path for path in memory.glob(f"{PREFIX}*") if _abandoned(path)]
    for path in found:
        shutil.rmtree(path, ignore_errors=True)
    return [path.name for path in found]


def _abandoned(directory: Path) -> bool:
    try:
        owner = json.loads((directory / OWNER).read_text())
        found = directory.stat()
        if found.st_uid != os.getuid() or owner["processes"] != _processes():
            return False
        if time.time() - found.st_mtime < owner.get("successor_s", 0.0):
            return False
        return not _lives(owner)
    except psutil.NoSuchProcess:
        return True
    except (OSError, ValueError, KeyError, TypeError, psutil.Error):
        return False


def _lives(owner: dict[str, Any]) -> bool:
    """Return True if the process that made a mark is alive. Raises psutil.NoSuchProcess if no process has its pid."""
    return abs(psutil.Process(owner["pid"]).create_time() - float(owner["began"])) <= REUSED_S


def _processes() -> str:
    """Return the name of this process's pid namespace, because containers have their own; empty if unknown."""
    with contextlib.suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return ""
