# SPDX-License-Identifier: Apache-2.0
"""Append-only files of records: JSON lines, plain or in zstd frames.

An append writes whole records; a failed append is undone. A kill may leave a torn end, which readers skip and the next
writer cuts off.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import zstandard

from relax_core.observe.files import disk_errors


class AppendOnlyFile:
    """An append-only file of records.

    Opening the file cuts off a torn last record: `whole` takes the file's bytes and returns the length of its whole
    records.
    """

    def __init__(self, path: Path, whole: Callable[[bytes], int]) -> None:
        self.path = path
        with disk_errors(path):
            if path.exists():
                data = path.read_bytes()
                if (length := whole(data)) < len(data):
                    os.truncate(path, length)
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def append(self, data: bytes) -> None:
        """Append all of `data`, or nothing if that fails."""
        with disk_errors(self.path):
            start = os.fstat(self._file).st_size
            try:
                view = memoryview(data)
                while view:
                    view = view[os.write(self._file, view) :]
            except OSError:
                os.ftruncate(self._file, start)
                raise

    def close(self) -> None:
        os.close(self._file)


def whole_lines(data: bytes) -> int:
    """Return the length of `data` up to and including its last line feed."""
    return data.rfind(b"\n") + 1


def read_lines(path: Path) -> Iterator[dict[str, object]]:
    """Yield the records of a JSON-lines file; skip torn or damaged lines."""
    if path.exists():
        yield from records(path.read_bytes())


def frame(lines: Iterable[str]) -> bytes:
    """Compress lines as one self-contained zstd frame."""
    body = "".join(line + "\n" for line in lines).encode("utf-8", errors="backslashreplace")
    return zstandard.ZstdCompressor(level=3, write_checksum=True).compress(body)


def whole_frames(data: bytes) -> int:
    """Return the length of the complete zstd frames at the start of `data`."""
    return sum(size for size, _ in _frames(data))


def read_frames(path: Path) -> Iterator[dict[str, object]]:
    """Yield the records of a file of zstd frames; skip a torn last frame."""
    if path.exists():
        for _, body in _frames(path.read_bytes()):
            yield from records(body)


def _frames(data: bytes) -> Iterator[tuple[int, bytes]]:
    rest = data
    while rest:
        reader = zstandard.ZstdDecompressor().decompressobj()
        try:
            body = reader.decompress(rest)
        except zstandard.ZstdError:
            return
        if not reader.eof:
            return
        yield len(rest) - len(reader.unused_data), body
        rest = reader.unused_data


def records(data: bytes) -> Iterator[dict[str, object]]:
    """Yield the records of JSON lines; skip torn or damaged lines."""
    for line in data.split(b"\n"):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict):
            yield record
