# SPDX-License-Identifier: Apache-2.0
"""Blocks as files in one storage's folder in memory: whoever is on its machine writes and reads them in place.

A block is a safetensors file of row lengths and values as they lie in memory; nothing of it is ever executed. Its name is
its block's key, so no name travels. It appears whole or not at all, and a reader keeps what it has mapped.
"""

from __future__ import annotations

import contextlib
import errno
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
from relax_core.api.errors import InfrastructureError
from relax_core.tensor_files.mapped_files import MEMORY, PREFIX, claim, read_or_map, sweep_abandoned, write_whole
from relax_core.tensor_files.safetensors_file import pack, parse

LENGTHS, VALUES = "lengths:", "values:"
"""Prefixes of the two arrays of a column."""
MAPPED_BYTES = 1 << 17
"""Files up to this size are read at once: a mapping costs more."""
SUCCESSOR_S = 300.0
"""For the next process of a storage to take its folder over, after the last change of a block: no sweep removes it before."""
POPULATE = 22
"""MADV_POPULATE_READ, for which Python has no name: all pages in one call, where each would be a fault of its own."""


def new_folder_name() -> str:
    """Make a name that nobody guesses."""
    return f"{PREFIX}bus-{secrets.token_hex(8)}"


@dataclass(frozen=True, slots=True)
class BlockFolder:
    """A folder with a random name: whoever finds it is on the machine of its storage."""

    path: str

    @classmethod
    def make(cls, name: str, memory: Path = MEMORY) -> Self | None:
        """Make this process's own, or take over that of a dead process with what is in it; a later run sweeps it if this one
        is killed. None where there is no memory-backed directory."""
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
        """Write a block; False where there is no room, or a column is of no plain numbers."""
        arrays = {LENGTHS + name: np.asarray(column.lengths, np.int64) for name, column in columns.items()}
        arrays |= {VALUES + name: column.values for name, column in columns.items()}
        try:
            parts = pack(arrays, {})
        except ValueError:
            return False
        if 2 * sum(map(len, parts)) > self._free_bytes():
            return False
        try:
            write_whole(Path(self._file(key)), Path(f"{self._file(key)}.part"), parts)
        except OSError as error:
            if error.errno == errno.ENOSPC:
                return False
            raise
        return True

    def read(self, key: int, columns: Sequence[str], whole: bool = True) -> dict[str, Ragged] | None:
        """Give columns read-only, in place; None where there is no such file. `whole`: all values are about to be read."""
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
                if whole and isinstance(memory, mmap.mmap) and values.nbytes:
                    at = values.ctypes.data - data.ctypes.data
                    first = at // mmap.PAGESIZE * mmap.PAGESIZE
                    with contextlib.suppress(OSError):  # of a kernel that does not know it: pages come as they are read
                        memory.madvise(POPULATE, first, at + values.nbytes - first)
                found[name] = Ragged(values, tensors[LENGTHS + name])
        except (ValueError, KeyError) as error:
            raise InfrastructureError(f"bus: block {key} in {self.path} is damaged: {error}") from error
        return found

    def keys(self) -> list[int]:
        """List the blocks that are whole."""
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

    def _free_bytes(self) -> int:
        """Half of it is left to weights and to Ray."""
        found = os.statvfs(self.path)
        return found.f_bavail * found.f_frsize
