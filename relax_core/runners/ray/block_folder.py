# SPDX-License-Identifier: Apache-2.0
"""Blocks (columns of rows) as files in a storage's memory-backed folder, read and written by processes on its machine.

A block is a safetensors file with row lengths and values; nothing in it is executed. The file name is the block's key.
A file is written atomically, and a reader's mapping stays valid even if the file is deleted.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np

from relax_core.api.batch import Ragged
from relax_core.api.errors import NO_ROOM, InfrastructureError
from relax_core.tensor_files.mapped_files import MEMORY, PREFIX, claim, read_or_map, sweep_abandoned, write_whole
from relax_core.tensor_files.safetensors_file import pack, parse

LENGTHS, VALUES = "lengths:", "values:"
"""Name prefixes of the two arrays that store a column."""
MAPPED_BYTES = 1 << 17
"""Files up to this size in bytes are read at once, since a mapping costs more."""
SUCCESSOR_S = 300.0
"""Seconds after the last change of a block in which no sweep removes the folder of a dead storage, so that its next
process can take the folder over.
"""
POPULATE = 22
"""MADV_POPULATE_READ, which Python does not define: loads all pages in one call instead of one page fault each."""


def new_folder_name() -> str:
    """Make a folder name that can't be guessed."""
    return f"{PREFIX}bus-{secrets.token_hex(8)}"


@dataclass(frozen=True, slots=True)
class BlockFolder:
    """A storage's folder of blocks. Its name is random, so only processes on the storage's machine find the folder."""

    path: str

    @classmethod
    def make(cls, name: str, memory: Path = MEMORY) -> Self | None:
        """Make a folder, or take over the folder of a dead process; return None without memory-backed storage.

        If this process is killed, a later run removes the folder.
        """
        if not memory.is_dir() or not os.access(memory, os.W_OK):
            return None
        path = memory / name
        path.mkdir(0o700, exist_ok=True)
        claim(path, SUCCESSOR_S)
        sweep_abandoned(memory)
        return cls(str(path))

    @property
    def here(self) -> bool:
        return os.path.isdir(self.path)

    def write(self, key: int, columns: Mapping[str, Ragged]) -> bool:
        """Write a block; return False if the folder lacks room or safetensors can't store a column's dtype."""
        arrays = {LENGTHS + name: np.asarray(column.lengths, np.int64) for name, column in columns.items()}
        arrays |= {VALUES + name: column.values for name, column in columns.items()}
        try:
            parts = pack(arrays, {})
        except ValueError:
            return False
        space = os.statvfs(self.path)
        if 2 * sum(map(len, parts)) > space.f_bavail * space.f_frsize:  # half is left to weights and to Ray
            return False
        try:
            write_whole(Path(self._file(key)), Path(f"{self._file(key)}.part"), parts)
        except OSError as error:
            if error.errno in NO_ROOM:
                return False
            raise
        return True

    def read(self, key: int, columns: Sequence[str]) -> dict[str, Ragged] | None:
        """Return columns as read-only views of a block's file; None without a file. All values are loaded now."""
        try:
            memory = read_or_map(self._file(key), MAPPED_BYTES + 1)
        except FileNotFoundError:
            return None
        data = np.frombuffer(memory, np.uint8)
        found = {}
        try:
            tensors = parse(data).tensors
            for name in [name.removeprefix(LENGTHS) for name in tensors if name.startswith(LENGTHS)]:
                if name not in columns:
                    continue
                values = tensors[VALUES + name]
                if isinstance(memory, mmap.mmap) and values.nbytes:
                    at = values.ctypes.data - data.ctypes.data
                    first = at // mmap.PAGESIZE * mmap.PAGESIZE
                    with contextlib.suppress(OSError):  # an older kernel loads the pages as they are read
                        memory.madvise(POPULATE, first, at + values.nbytes - first)
                found[name] = Ragged(values, tensors[LENGTHS + name])
        except (ValueError, KeyError) as error:
            raise InfrastructureError(f"bus: block {key} in {self.path} is damaged: {error}") from error
        return found

    def keys(self) -> list[int]:
        """List the keys of the complete blocks."""
        return [int(name) for name in os.listdir(self.path) if name.isdigit()]

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
