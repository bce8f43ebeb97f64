"""The bus `{{ cookiecutter.name }}`: keeps the payloads of rows as files in a folder.

A bus component only decides where payloads are. Admission, leases and the ledger are the core's. Replace `FileStore` by a
client of your store.
"""

import asyncio
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from relax_core.api import BusComponent, Options, Ragged
from relax_core.api.bus import PayloadStore


class {{ cookiecutter.class_name }}Options(Options):
    """Options of `{{ cookiecutter.name }}`."""

    directory: str = ""
    """Folder in which each run makes its own folder; all machines of the run must see it. Empty: the temporary folder."""


class {{ cookiecutter.class_name }}(BusComponent[{{ cookiecutter.class_name }}Options]):
    """A bus whose rows lie in files, so that the memory of one process does not limit them."""

    async def open_store(self) -> PayloadStore:
        return FileStore(Path(tempfile.mkdtemp(prefix="{{ cookiecutter.name }}-", dir=self.options.directory or None)))


class FileStore:
    """A store with one file for each block of columns. Calls that wait for the disk run in threads."""

    shared = True  # a copy of this object in another process reaches the same blocks

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def put(self, key: int, columns: Mapping[str, Ragged]) -> None:
        await asyncio.to_thread(self._write, key, columns)

    async def get(self, keys: Sequence[int], columns: Sequence[str]) -> Mapping[int, Mapping[str, Ragged]]:
        return {key: await asyncio.to_thread(self._read, key, columns) for key in keys}

    async def free(self, keys: Sequence[int]) -> None:
        for key in keys:
            self._path(key).unlink(missing_ok=True)

    async def close(self) -> None:
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    def _path(self, key: int) -> Path:
        return self._folder / f"{key}.npz"

    def _write(self, key: int, columns: Mapping[str, Ragged]) -> None:
        arrays = {f"{name}/values": column.values for name, column in columns.items()}
        arrays |= {f"{name}/lengths": column.lengths for name, column in columns.items()}
        unfinished = self._path(key).with_suffix(".tmp")
        with unfinished.open("wb") as file:
            np.savez(file, **arrays)
        unfinished.rename(self._path(key))  # a reader sees a whole block or none

    def _read(self, key: int, columns: Sequence[str]) -> Mapping[str, Ragged]:
        with np.load(self._path(key)) as stored:
            held = [name for name in columns if f"{name}/values" in stored]
            return {name: Ragged(stored[f"{name}/values"], stored[f"{name}/lengths"]) for name in held}
