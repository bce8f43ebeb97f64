# SPDX-License-Identifier: Apache-2.0
"""Blocks as files in one storage's folder in memory: whoever is on its machine writes and reads them in place.

A file is a header of JSON, row lengths, and values as they lie in memory; nothing of it is ever executed. Its name is
its block's key, so no name travels. It appears whole or not at all, and a reader keeps what it has mapped.
"""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import secrets
import shutil
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from relax_core.api.batch import Ragged
from relax_core.api.errors import InfrastructureError
from relax_core.tensor_files.mapped_files import MEMORY, PREFIX, claim, sweep_abandoned

START = struct.Struct("<8sQ")
MAGIC = b"rlxblock"
ALIGNED = 64
PLAIN = frozenset("biufc")
"""Kinds of numbers that a name and bytes say all of."""
MAPPED_BYTES = 1 << 17
"""Smaller files are read at once: a mapping costs more."""
POPULATE = 22
"""MADV_POPULATE_READ, for which Python has no name: all pages in one call, where each would be a fault of its own."""


@dataclass(frozen=True, slots=True)
class BlockFolder:
    """A folder with a random name: whoever finds it is on the machine of its storage."""

    path: str

    @classmethod
    def make(cls, memory: Path = MEMORY) -> Self | None:
        """This process's own, swept by a later run if it is killed; None where there is no memory-backed directory."""
        if not memory.is_dir() or not os.access(memory, os.W_OK):
            return None
        sweep_abandoned(memory)
        path = memory / f"{PREFIX}bus-{secrets.token_hex(8)}"
        path.mkdir(0o700)
        claim(path)
        return cls(str(path))

    @property
    def here(self) -> bool:
        return os.path.isdir(self.path)

    def write(self, key: int, columns: Mapping[str, Ragged]) -> bool:
        """False where there is no room, or a column is of no plain numbers."""
        if any(column.values.dtype.kind not in PLAIN for column in columns.values()):
            return False
        head, placed, size = _layout(columns)
        if 2 * size > self._free_bytes():
            return False
        part = f"{self._file(key)}.part"
        try:
            _write(part, head, placed, size)
            os.rename(part, self._file(key))
        except BaseException as error:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(part)
            if isinstance(error, OSError) and error.errno == errno.ENOSPC:
                return False
            raise
        return True

    def read(self, key: int, columns: Sequence[str], whole: bool = True) -> dict[str, Ragged] | None:
        """Read-only, in place; None where there is no such file. `whole`: all values are about to be read."""
        try:
            memory = _opened(self._file(key))
        except FileNotFoundError:
            return None
        try:
            return _columns(memory, columns, whole)
        except (ValueError, TypeError, KeyError, struct.error) as error:
            raise InfrastructureError(f"bus: block {key} in {self.path} is damaged: {error}") from error

    def has(self, key: int) -> bool:
        return os.path.isfile(self._file(key))

    def free(self, keys: Sequence[int]) -> None:
        for key in keys:
            for path in (self._file(key), f"{self._file(key)}.part"):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    def _file(self, key: int) -> str:
        return f"{self.path}/{int(key)}"

    def _free_bytes(self) -> int:
        """Half of it is left to weights and to Ray."""
        found = os.statvfs(self.path)
        return found.f_bavail * found.f_frsize


def _layout(columns: Mapping[str, Ragged]) -> tuple[bytes, list[tuple[int, np.ndarray]], int]:
    """The file's head with all lengths, what is to be written where, and the file's size."""
    lengths = [np.ascontiguousarray(column.lengths, np.int64) for column in columns.values()]
    values = [np.ascontiguousarray(column.values) for column in columns.values()]
    at = _aligned(sum(length.nbytes for length in lengths))
    placed, described = [], []
    for (name, length), value in zip(zip(columns, lengths, strict=True), values, strict=True):
        described.append([name, value.dtype.str, value.shape, at, len(length)])
        placed.append((at, value))
        at = _aligned(at + value.nbytes)
    said = json.dumps(described).encode()
    begin = _aligned(START.size + len(said))
    head = START.pack(MAGIC, len(said)) + said
    head = head.ljust(begin, b"\0") + b"".join(length.tobytes() for length in lengths)
    return head, [(begin + at, value) for at, value in placed], begin + at


def _aligned(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


def _write(path: str, head: bytes, placed: Sequence[tuple[int, np.ndarray]], size: int) -> None:
    file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, 0o600)
    try:
        os.ftruncate(file, size)
        _write_at(file, 0, memoryview(head))
        for at, values in placed:
            _write_at(file, at, values.reshape(-1).view(np.uint8).data)
    finally:
        os.close(file)


def _write_at(file: int, at: int, data: memoryview) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(file, data[done:], at + done)


def _opened(path: str) -> bytes | mmap.mmap:
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        size = os.fstat(file).st_size
        if size <= MAPPED_BYTES:
            return os.read(file, size)
        return mmap.mmap(file, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    finally:
        os.close(file)


def _columns(memory: bytes | mmap.mmap, columns: Sequence[str], whole: bool) -> dict[str, Ragged]:
    magic, said = START.unpack_from(memory)
    if magic != MAGIC:
        raise ValueError(f"it begins with {magic!r}")
    begin = lengths_at = _aligned(START.size + said)
    found = {}
    for name, dtype, shape, at, rows in json.loads(memory[START.size : START.size + said]):
        if name in columns:
            lengths: np.ndarray[Any, Any] = np.ndarray(rows, np.int64, memory, lengths_at)
            values: np.ndarray[Any, Any] = np.ndarray(tuple(shape), np.dtype(dtype), memory, begin + at)
            if whole and isinstance(memory, mmap.mmap):
                _populate(memory, begin + at, values.nbytes)
            found[name] = Ragged(values, lengths)
        lengths_at += 8 * rows
    return found


def _populate(memory: mmap.mmap, at: int, size: int) -> None:
    first = at // mmap.PAGESIZE * mmap.PAGESIZE
    if size:
        with contextlib.suppress(OSError):  # of a kernel that does not know it: pages come as they are read
            memory.madvise(POPULATE, first, at + size - first)
