# SPDX-License-Identifier: Apache-2.0
"""The `files` task source: whatever a path is, read by the source for it. JSON lines, or a table or folder of tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import ClassVar

from relax_core.api.source import BadRow, TaskSource
from relax_core.api.task import Task
from relax_core.rollout.jsonl import JsonLines
from relax_core.rollout.table import Table, TableOptions
from relax_core.rollout.table_files import SUFFIXES, is_table


class Files(TaskSource[TableOptions]):
    """Tasks of a `.jsonl`, `.json`, `.parquet` or `.arrow` file, or of a dataset folder."""

    suffixes: ClassVar[tuple[str, ...]] = (*JsonLines.suffixes, *SUFFIXES)

    def open(self, path: str, columns: Mapping[str, str]) -> None:
        """Raises ConfigError at the first unusable row; the usable ones can be read all the same."""
        self._source: TaskSource = Table(self.options) if is_table(Path(path)) else JsonLines()
        self._source.open(path, columns)

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> Task:
        return self._source[index]

    def where(self, index: int) -> str:
        return self._source.where(index)

    def problems(self) -> Iterator[BadRow]:
        return self._source.problems()
