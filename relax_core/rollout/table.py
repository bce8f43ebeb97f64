# SPDX-License-Identifier: Apache-2.0
"""The `table` task source: Parquet files, and dataset folders as `datasets` saves them (`save_to_disk`, or Parquet files).

Every row is read once at `open` and judged; after that only its place is kept, and blocks of rows (Parquet row groups, without
their media) that were looked at last, within a bound. Random access, so a resumed run goes on at the same task.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from relax_core.api.errors import ConfigError
from relax_core.api.options import Options
from relax_core.api.source import BadRow, TaskSource
from relax_core.api.task import Task
from relax_core.rollout.jsonl_row import RowError, row_task
from relax_core.rollout.row_media import Home
from relax_core.rollout.table_files import FIELD, SUFFIXES, stretches, table_files

CACHED_BYTES = 64 << 20
"""Of blocks that were looked at last; one is kept however large it is."""
AT_ONCE = 256
"""Rows that are Python objects at a time while a file is judged."""


class TableOptions(Options):
    """`source = { name = "table", split = "train" }`."""

    split: str = ""
    """Which split of a folder that holds several."""


class Table(TaskSource[TableOptions]):
    """Tasks of a table."""

    suffixes: ClassVar[tuple[str, ...]] = SUFFIXES

    def open(self, path: str, columns: Mapping[str, str]) -> None:
        """Raises ConfigError at the first unusable row; the usable ones can be read all the same."""
        self._columns = dict(columns)
        self._of_file, self._row = array("i"), array("q")
        self._bad: list[BadRow] = []
        self._blocks: OrderedDict[tuple[int, int], Any] = OrderedDict()
        self._blocks_bytes = 0
        self._files = table_files(Path(path), self.options.split)
        ids: set[str] = set()
        for number in range(len(self._files)):
            self._scan(number, ids)
        self._refuse(path)

    def __len__(self) -> int:
        return len(self._row)

    def __getitem__(self, index: int) -> Task:
        if not 0 <= index < len(self):
            raise IndexError(index)
        number, row = self._of_file[index], self._row[index]
        file = self._files[number]
        block = bisect_right(file.starts, row) - 1
        (found,) = file.rows(self._block(number, block), row - file.starts[block], 1)
        return self._task(found, number, row)

    def where(self, index: int) -> str:
        return self._where(self._of_file[index], self._row[index])

    def problems(self) -> Iterator[BadRow]:
        return iter(self._bad)

    def _scan(self, number: int, ids: set[str]) -> None:
        file = self._files[number]
        for block, start in enumerate(file.starts[:-1]):
            data = file.block(block)
            for first, count in stretches(file.starts[block + 1] - start, AT_ONCE):
                for place, row in enumerate(file.rows(data, first, count), start + first):
                    self._keep(row, number, place, ids)

    def _keep(self, row: dict[str, Any], number: int, place: int, ids: set[str]) -> None:
        try:
            task = self._task(row, number, place)
            if task.id in ids and "id" not in self._columns:
                raise RowError(f"id {task.id!r} is used twice")
            ids.add(task.id)
        except RowError as error:
            self._bad.append(BadRow(self._where(number, place), str(error)))
            return
        self._of_file.append(number)
        self._row.append(place)

    def _block(self, number: int, block: int) -> Any:
        key = number, block
        if key in self._blocks:
            self._blocks.move_to_end(key)
            return self._blocks[key]
        data = self._blocks[key] = self._files[number].block(block)
        self._blocks_bytes += data.nbytes
        while self._blocks_bytes > CACHED_BYTES and len(self._blocks) > 1:
            self._blocks_bytes -= self._blocks.popitem(last=False)[1].nbytes
        return data

    def _task(self, row: dict[str, Any], number: int, place: int) -> Task:
        path = self._files[number].path
        home = Home(path.parent, str(path.absolute()), place)
        return row_task(row, self._columns, f"{path.stem}:{place + 1}", home)

    def _where(self, number: int, place: int) -> str:
        return f"{self._files[number].path} row {place + 1}"

    def _refuse(self, path: str) -> None:
        if self._bad:
            first, others = self._bad[0], len(self._bad) - 1
            got = f"{first.where}: {first.reason}" + (f" (and {others} more bad rows)" if others else "")
            raise ConfigError(FIELD, got, f"correct the file; `relax data check {path}` lists every bad row")
        if not self._row:
            raise ConfigError(FIELD, f"{path}, which holds no rows", "write rows with the columns prompt and answer")
