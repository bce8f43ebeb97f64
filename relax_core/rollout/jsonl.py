# SPDX-License-Identifier: Apache-2.0
"""The `jsonl` task source: a JSON object a line, `{"prompt": text or messages, "answer": ...}`, or one JSON list.

Every row is read once at `open` and judged; after that only its place in the file is kept (of a list, which
can't be read in part, the rows). Unusable rows are all listed by `problems`.
"""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

from relax_core.api.errors import ConfigError
from relax_core.api.options import Options
from relax_core.api.source import BadRow, TaskSource
from relax_core.api.task import Task
from relax_core.rollout.jsonl_row import RowError, row_task
from relax_core.rollout.row_media import Home

FIELD = "data"


class JsonLines(TaskSource[Options]):
    """Tasks of a `.jsonl` or `.json` file."""

    suffixes: ClassVar[tuple[str, ...]] = (".jsonl", ".json")

    def open(self, path: str, columns: Mapping[str, str]) -> None:
        """Raises ConfigError at the first unusable row; the usable ones can be read all the same."""
        self._path, self._columns = Path(path), dict(columns)
        self._starts, self._lengths, self._lines = array("q"), array("q"), array("q")
        self._rows: list[Any] = []
        self._bad: list[BadRow] = []
        self._ids: set[str] = set()
        self._file = _open(self._path)
        if self._path.suffix == ".json":
            self._scan_list()
        else:
            self._scan_lines()
        self._ids.clear()
        self._refuse()

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: int) -> Task:
        if not 0 <= index < len(self):
            raise IndexError(index)
        if self._rows:
            return self._task(self._rows[index], self._lines[index], None)
        return self._task(self._read(index), self._lines[index], self._starts[index])

    def where(self, index: int) -> str:
        return self._where(self._lines[index])

    def problems(self) -> Iterator[BadRow]:
        return iter(self._bad)

    def _scan_lines(self) -> None:
        start = 0
        for number, line in enumerate(self._file, 1):
            if line.strip() and self._keep(line, number, start):
                self._starts.append(start)
                self._lengths.append(len(line))
            start += len(line)

    def _scan_list(self) -> None:
        try:
            rows = json.loads(self._file.read())
        except (ValueError, RecursionError) as error:
            self._bad.append(BadRow(f"{self._path}:{getattr(error, 'lineno', 1)}", f"malformed JSON: {error}"))
            return
        if not isinstance(rows, list):
            self._bad.append(BadRow(f"{self._path}:1", "a .json file holds one list; name objects a line .jsonl"))
            return
        self._rows = [row for number, row in enumerate(rows, 1) if self._keep(row, number)]

    def _keep(self, row: Any, number: int, start: int | None = None) -> bool:
        """Judge one row, given as its line with where that begins, or as what a list holds."""
        try:
            task = self._task(_parse(row) if isinstance(row, bytes) else row, number, start)
            self._once(task.id)
        except RowError as error:
            self._bad.append(BadRow(self._where(number), str(error)))
            return False
        self._lines.append(number)
        return True

    def _once(self, task_id: str) -> None:
        if "id" not in self._columns and task_id in self._ids:
            raise RowError(f"id {task_id!r} is used twice")
        self._ids.add(task_id)

    def _read(self, index: int) -> Any:
        start, length = self._starts[index], self._lengths[index]
        try:
            return _parse(os.pread(self._file.fileno(), length, start))
        except RowError as error:
            raise ConfigError(FIELD, f"{self.where(index)}, changed since it was opened", "start again") from error

    def _task(self, row: Any, number: int, start: int | None) -> Task:
        folder = self._path.parent
        home = Home(folder) if start is None else Home(folder, str(self._path.absolute()), start)
        return row_task(row, self._columns, f"{self._path.stem}:{number}", home)

    def _where(self, number: int) -> str:
        return f"{self._path}:{number}" if self._path.suffix != ".json" else f"{self._path} item {number}"

    def _refuse(self) -> None:
        if self._bad:
            first, others = self._bad[0], len(self._bad) - 1
            got = f"{first.where}: {first.reason}" + (f" (and {others} more bad rows)" if others else "")
            raise ConfigError(FIELD, got, f"correct the file; `relax data check {self._path}` lists every bad row")
        if not self._lines:
            raise ConfigError(FIELD, f"{self._path}, which holds no rows", 'write rows {"prompt": ..., "answer": ...}')


def _open(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise ConfigError(
            FIELD, f"{path}: {error.strerror}", "name a readable .jsonl or .json file of tasks"
        ) from error


def _parse(line: bytes) -> Any:
    try:
        return json.loads(line)
    except UnicodeDecodeError as error:
        raise RowError(f"not UTF-8: {error.reason} at byte {error.start}") from error
    except ValueError as error:
        raise RowError(f"malformed JSON: {error}") from error
    except RecursionError as error:
        raise RowError("malformed JSON: nested too deeply") from error
