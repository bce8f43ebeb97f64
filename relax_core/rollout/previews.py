# SPDX-License-Identifier: Apache-2.0
"""Copies of media for people, in the run directory, by the key of the medium: the first ones of a run and the newest ones.

A page of transcripts shows a run's beginning and its end; what was between makes room. Nothing of a run reads them.
"""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

from relax_core.api.media_store import write_whole

PREVIEWS = "previews"
FIRST_BYTES = 8 << 20
"""Of each kind of medium, what came first stays."""
NEWEST_BYTES = 24 << 20


class Previews:
    """Those of one kind of medium."""

    def __init__(self, directory: Path, kind: str) -> None:
        self._directory, self._kind = directory, kind
        self._first = 0
        self._newest: OrderedDict[Path, int] = OrderedDict()
        found = [(path.stat().st_mtime, path) for path in directory.glob(f"*.{kind}")] if directory.is_dir() else []
        for _, path in sorted(found):
            self._count(path, path.stat().st_size)

    def __contains__(self, key: str) -> bool:
        return self._path(key).is_file()

    def put(self, key: str, data: bytes) -> None:
        """Whole or not at all; InfrastructureError where it can't be written."""
        path = self._path(key)
        write_whole(path, [data])
        self._count(path, len(data))

    def _count(self, path: Path, size: int) -> None:
        if self._first + size <= FIRST_BYTES:
            self._first += size
            return
        self._newest[path] = size
        while sum(self._newest.values()) > NEWEST_BYTES and len(self._newest) > 1:
            self._newest.popitem(last=False)[0].unlink(missing_ok=True)

    def _path(self, key: str) -> Path:
        return self._directory / f"{key}.{self._kind}"
