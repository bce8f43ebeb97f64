# SPDX-License-Identifier: Apache-2.0
"""Files that only grow: JSON lines, and JSON lines in zstd frames. A kill or a full disk never spoils what was there.

An append is one write of whole records; one that fails half-way is taken back. A torn end left by a kill is skipped
by readers and cut off before the next append. Any tool that reads JSON lines or zstd reads these files.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import zstandard

from relax_core.observe.documents import disk_errors


class AppendOnlyFile:
    """An append-only file, opened at the end of its last whole record."""

    def __init__(self, path: Path, whole: Callable[[bytes], int]) -> None:
        self.path = path
        with disk_errors(path):
            if path.exists():
                _cut_torn_end(path, whole)
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def append(self, data: bytes) -> None:
        """All of it or nothing."""
        with disk_errors(self.path):
            start = os.fstat(self._file).st_size
            try:
                view = memoryview(data)
                while view:
                    view = view[os.write(self._file, view) :]
            except OSError:
                os.ftruncate(self._file, start)
                raise

    def sync(self) -> None:
        """Onto the disk itself."""
        with disk_errors(self.path):
            os.fsync(self._file)

    def close(self) -> None:
        os.close(self._file)


def _cut_torn_end(path: Path, whole: Callable[[bytes], int]) -> None:
    data = path.read_bytes()
    length = whole(data)
    if length < len(data):
        os.truncate(path, length)


def whole_lines(data: bytes) -> int:
    """Length of the part that ends in a line feed."""
    return data.rfind(b"\n") + 1


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Records of a JSON-lines file; a torn or damaged line is skipped."""
    if path.exists():
        yield from _records(path.read_bytes())


def rewrite_lines(path: Path, keep: Callable[[dict[str, Any]], bool], replace: Callable[[Path, bytes], None]) -> None:
    """Keep only some records of a JSON-lines file."""
    kept = [
        json.dumps(record, ensure_ascii=False, separators=(",", ":")) for record in read_lines(path) if keep(record)
    ]
    replace(path, "".join(line + "\n" for line in kept).encode())


def frame(lines: Iterable[str]) -> bytes:
    """Lines as one zstd frame, complete in itself."""
    body = "".join(line + "\n" for line in lines).encode("utf-8", errors="backslashreplace")
    return zstandard.ZstdCompressor(level=3, write_checksum=True).compress(body)


def whole_frames(data: bytes) -> int:
    """Length of the part made of complete zstd frames."""
    return sum(size for size, _ in _frames(data))


def read_frames(path: Path) -> Iterator[dict[str, Any]]:
    """Records of a file of zstd frames; a torn last frame is skipped."""
    if path.exists():
        for _, body in _frames(path.read_bytes()):
            yield from _records(body)


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


def _records(data: bytes) -> Iterator[dict[str, Any]]:
    for line in data.split(b"\n"):
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            yield record
