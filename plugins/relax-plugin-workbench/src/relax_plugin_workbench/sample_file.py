# SPDX-License-Identifier: Apache-2.0
"""The file of a `relax rollout`: one line per sample, group by group, which a new start continues after a kill."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from relax_core.api.errors import ConfigError
from relax_core.runs import Redactor, disk_errors, encode

SCHEMA = "relax.sample/1"


class SampleFile:
    """The samples of whole groups in a file of JSON lines, open in one process at a time.

    Invariants:
    - Each group is appended at once, so a kill damages at most the last group of the file; opening removes that group.
    - `groups` are the groups of the file.
    """

    def __init__(self, path: Path, group_size: int, redactor: Redactor) -> None:
        """Open or create the file. Raises ConfigError if another process writes it, or for damage before its end."""
        self._path, self._size, self._redactor = path, group_size, redactor
        self.groups: set[int] = set()
        self.num_judged, self.num_failed, self._sum = 0, 0, 0.0
        with disk_errors(path):
            self._file = path.open("a+b")
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                self._file.close()
                raise ConfigError(
                    "--out", f"{path.parent}, which another process writes", "wait for its end"
                ) from error
            try:
                self._file.seek(0)
                end = 0
                while (records := self._next_group(self._file)) is not None:
                    self._count(records)
                    end = self._file.tell()
                self._file.seek(end)
                if sum(1 for _ in islice(self._file, self._size + 1)) > self._size:
                    line = len(self.groups) * self._size + 1
                    fix = "restore the file, or name a new folder"
                    raise ConfigError(str(path), f"no whole group of {self._size} samples from line {line} on", fix)
                self._file.truncate(end)
            except BaseException:
                self._file.close()
                raise

    @property
    def mean(self) -> float | None:
        """Mean reward of the judged samples; None if no sample was judged."""
        return self._sum / self.num_judged if self.num_judged else None

    def append(self, records: Sequence[dict[str, Any]]) -> None:
        """Append the samples of one group."""
        text = "".join(self._redactor.known(encode({"schema": SCHEMA, **record})) + "\n" for record in records)
        with disk_errors(self._path):
            self._file.write(text.encode("utf-8", errors="backslashreplace"))
            self._file.flush()
        self._count(records)

    def close(self) -> None:
        """Wait until the disk stores the samples, and close the file."""
        with disk_errors(self._path), self._file:
            os.fsync(self._file.fileno())

    def _next_group(self, file: BinaryIO) -> list[dict[str, Any]] | None:
        lines = [*islice(file, self._size)]
        if len(lines) < self._size or not lines[-1].endswith(b"\n"):
            return None
        try:
            records = [json.loads(line) for line in lines]
            whole = {(record["group_id"], record["sample_index"]) for record in records}
            group = int(records[0]["group_id"])
        except (ValueError, TypeError, LookupError, RecursionError):
            return None
        return records if whole == {(group, index) for index in range(self._size)} else None

    def _count(self, records: Sequence[dict[str, Any]]) -> None:
        rewards = [float(record["reward"]) for record in records if record["reward"] is not None]
        self.groups.add(int(records[0]["group_id"]))
        self.num_judged += len(rewards)
        self.num_failed += len(records) - len(rewards)
        self._sum += sum(rewards)
