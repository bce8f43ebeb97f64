# SPDX-License-Identifier: Apache-2.0
"""Task sources: `jsonl` (JSON lines, or one JSON list), `table` (Parquet and Arrow files, or a folder of them) and `files`.

Every row is read once at `open` and checked; after that only its place is kept, so a resumed run goes on at the same task.
A row becomes a `Task` in `task_row`.
"""

from __future__ import annotations

import json
import os
import re
from abc import ABC, abstractmethod
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, ClassVar

from relax_core.api.errors import ConfigError
from relax_core.api.options import Options
from relax_core.api.source import BadRow, TaskSource
from relax_core.api.task import Task
from relax_core.data.task_row import EMBEDDED, MediaOrigin, RowError, row_task
from relax_core.media.embedded import SAMPLES, arrow_batches

FIELD = "data"
SUFFIXES = (".parquet", ".arrow")
CACHED_BYTES = 64 << 20
"""Size of the blocks of a table that are kept, the last ones that were read; one is kept however large it is."""
AT_ONCE = 256
"""Rows that are Python objects at a time while a table is checked."""
_SHARD = re.compile(r"^(.*?)-\d+(?:-of-\d+)?(?:-[0-9a-f]+)?$")
_STEPS = ("list", "element", "item", "array_element")
"""Parquet's names for the way into a list."""


class RowCheck:
    """Ids and faults of a file's rows, while they are read once."""

    def __init__(self, columns: Mapping[str, str]) -> None:
        self._own_ids, self._ids = "id" not in columns, set[str]()
        self.bad: list[BadRow] = []

    def once(self, task: Task) -> None:
        """Raise RowError for a second task of one id, unless the configuration names the column of ids."""
        if self._own_ids and task.id in self._ids:
            raise RowError(f"id {task.id!r} is used twice")
        self._ids.add(task.id)

    def refuse(self, path: str, num_rows: int, example: str) -> None:
        """Raise ConfigError where a row is bad, or there is none."""
        self._ids.clear()
        if self.bad:
            first, others = self.bad[0], len(self.bad) - 1
            got = f"{first.where}: {first.reason}" + (f" (and {others} more bad rows)" if others else "")
            raise ConfigError(FIELD, got, f"correct the file; `relax data check {path}` lists every bad row")
        if not num_rows:
            raise ConfigError(FIELD, f"{path}, which holds no rows", f"write rows {example}")


class JsonLines(TaskSource[Options]):
    """Tasks of a `.jsonl` or `.json` file: an object a line, `{"prompt": text or messages, "answer": ...}`, or one list.

    For lines only their places in the file are kept; a list can't be read in part, so its rows are kept.
    """

    suffixes: ClassVar[tuple[str, ...]] = (".jsonl", ".json")

    def open(self, path: str, columns: Mapping[str, str]) -> None:
        """Raises ConfigError at the first unusable row; the usable ones can be read all the same."""
        self._path, self._columns = Path(path), dict(columns)
        self._starts, self._lengths, self._lines = array("q"), array("q"), array("q")
        self._rows: list[Any] = []
        self._check = RowCheck(columns)
        try:
            self._file = self._path.open("rb")
        except OSError as error:
            fix = "name a readable .jsonl or .json file of tasks"
            raise ConfigError(FIELD, f"{self._path}: {error.strerror}", fix) from error
        if self._path.suffix == ".json":
            self._scan_list()
        else:
            self._scan_lines()
        self._check.refuse(str(self._path), len(self._lines), '{"prompt": ..., "answer": ...}')

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: int) -> Task:
        if not 0 <= index < len(self):
            raise IndexError(index)
        if self._rows:
            return self._task(self._rows[index], self._lines[index], None)
        start, length = self._starts[index], self._lengths[index]
        try:
            row = _parse(os.pread(self._file.fileno(), length, start))
        except RowError as error:
            raise ConfigError(FIELD, f"{self.where(index)}, changed since it was opened", "start again") from error
        return self._task(row, self._lines[index], start)

    def where(self, index: int) -> str:
        return self._where(self._lines[index])

    def problems(self) -> Iterator[BadRow]:
        return iter(self._check.bad)

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
            self._check.bad.append(BadRow(f"{self._path}:{getattr(error, 'lineno', 1)}", f"malformed JSON: {error}"))
            return
        if not isinstance(rows, list):
            self._check.bad.append(BadRow(f"{self._path}:1", "a .json file holds one list; name objects a line .jsonl"))
            return
        self._rows = [row for number, row in enumerate(rows, 1) if self._keep(row, number)]

    def _keep(self, row: Any, number: int, start: int | None = None) -> bool:
        """Check one row, given as its line with the place where that begins, or as an item of the list."""
        try:
            self._check.once(self._task(_parse(row) if isinstance(row, bytes) else row, number, start))
        except RowError as error:
            self._check.bad.append(BadRow(self._where(number), str(error)))
            return False
        self._lines.append(number)
        return True

    def _task(self, row: Any, number: int, start: int | None) -> Task:
        folder = self._path.parent
        origin = MediaOrigin(folder) if start is None else MediaOrigin(folder, str(self._path.absolute()), start)
        return row_task(row, self._columns, f"{self._path.stem}:{number}", origin)

    def _where(self, number: int) -> str:
        return f"{self._path}:{number}" if self._path.suffix != ".json" else f"{self._path} item {number}"


def _parse(line: bytes) -> Any:
    try:
        return json.loads(line)
    except UnicodeDecodeError as error:
        raise RowError(f"not UTF-8: {error.reason} at byte {error.start}") from error
    except ValueError as error:
        raise RowError(f"malformed JSON: {error}") from error
    except RecursionError as error:
        raise RowError("malformed JSON: nested too deeply") from error


class TableOptions(Options):
    """`source = { name = "table", split = "train" }`."""

    split: str = ""
    """Which split of a folder that holds several."""


class TableSource(TaskSource[TableOptions]):
    """Tasks of Parquet files, and of dataset folders as `datasets` saves them (`save_to_disk`, or Parquet files).

    Blocks of rows (row groups or record batches, without their media) that were read last are kept within a bound.
    """

    suffixes: ClassVar[tuple[str, ...]] = SUFFIXES

    def open(self, path: str, columns: Mapping[str, str]) -> None:
        """Raises ConfigError at the first unusable row; the usable ones can be read all the same."""
        self._columns = dict(columns)
        self._of_file, self._row = array("i"), array("q")
        self._check = RowCheck(columns)
        self._blocks: OrderedDict[tuple[int, int], Any] = OrderedDict()
        self._blocks_bytes = 0
        self._files = table_files(Path(path), self.options.split)
        for number, file in enumerate(self._files):
            for block, start in enumerate(file.starts[:-1]):
                data, end = file.block(block), file.starts[block + 1]
                for first in range(start, end, AT_ONCE):
                    rows = file.rows(data, first - start, min(AT_ONCE, end - first))
                    for place, row in enumerate(rows, first):
                        self._keep(row, number, place)
        self._check.refuse(path, len(self._row), "with the columns prompt and answer")

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
        return iter(self._check.bad)

    def _keep(self, row: dict[str, Any], number: int, place: int) -> None:
        try:
            self._check.once(self._task(row, number, place))
        except RowError as error:
            self._check.bad.append(BadRow(self._where(number, place), str(error)))
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
        origin = MediaOrigin(path.parent, str(path.absolute()), place)
        return row_task(row, self._columns, f"{path.stem}:{place + 1}", origin)

    def _where(self, number: int, place: int) -> str:
        return f"{self._files[number].path} row {place + 1}"


class Files(TaskSource[TableOptions]):
    """Tasks of a `.jsonl`, `.json`, `.parquet` or `.arrow` file, or of a dataset folder."""

    suffixes: ClassVar[tuple[str, ...]] = (*JsonLines.suffixes, *SUFFIXES)

    def open(self, path: str, columns: Mapping[str, str]) -> None:
        """Raises ConfigError at the first unusable row; the usable ones can be read all the same."""
        is_table = Path(path).is_dir() or Path(path).suffix in SUFFIXES
        self._source: TaskSource = TableSource(self.options) if is_table else JsonLines()
        self._source.open(path, columns)

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> Task:
        return self._source[index]

    def where(self, index: int) -> str:
        return self._source.where(index)

    def problems(self) -> Iterator[BadRow]:
        return self._source.problems()


# -- files of a table -----------------------------------------------------------------------------------------------


class TableFile(ABC):
    """One file of a table, read block by block. Columns of bytes (media) are not read: `EMBEDDED` stands in their place."""

    def __init__(self, path: Path, sizes: Sequence[int]) -> None:
        self.path = path
        self.starts = [0, *accumulate(sizes)]
        """First rows of the blocks [blocks + 1], and behind the last the number of rows."""

    @abstractmethod
    def block(self, number: int) -> Any:
        """Read a block for `rows`; the caller keeps it while it reads on."""

    @abstractmethod
    def rows(self, block: Any, start: int, count: int) -> list[dict[str, Any]]:
        """Give rows of a block as plain Python."""


class ParquetTable(TableFile):
    """A Parquet file, read by row groups without leaves of bytes."""

    def __init__(self, path: Path) -> None:
        from pyarrow import parquet

        self._file = parquet.ParquetFile(path, pre_buffer=False)
        told = self._file.metadata
        super().__init__(path, [told.row_group(number).num_rows for number in range(told.num_row_groups)])
        self._names: list[str] = list(self._file.schema_arrow.names)
        leaves = [self._file.schema.column(number) for number in range(len(self._file.schema))]
        heavy = {leaf.path for leaf in leaves if _heavy(leaf)}
        self._kept = [leaf.path for leaf in leaves if leaf.path not in heavy]
        self._left = [[step for step in path.split(".") if step not in _STEPS] for path in heavy]
        whole = {path for path in heavy if "." in path} - {path for path in heavy if _has_sibling(path, self._kept)}
        if whole:
            fix = "write media as structs {bytes, path}, as `datasets` does, or as paths"
            raise ConfigError(FIELD, f"{path}, whose column {min(whole)!r} is a list of bare bytes", fix)

    def block(self, number: int) -> Any:
        return self._file.read_row_group(number, columns=self._kept, use_threads=False)

    def rows(self, block: Any, start: int, count: int) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = block.slice(start, count).to_pylist()
        for row in found:
            for path in self._left:
                _mark(row, path)
        return found


class ArrowTable(TableFile):
    """An Arrow file, mapped whole; its record batches are read when they are looked at."""

    def __init__(self, path: Path) -> None:
        self._batches = arrow_batches(str(path))
        super().__init__(path, [batch.num_rows for batch in self._batches])

    def block(self, number: int) -> Any:
        return self._batches[number]

    def rows(self, block: Any, start: int, count: int) -> list[dict[str, Any]]:
        names = block.schema.names
        return [
            {name: _light(column[row]) for name, column in zip(names, block.columns, strict=True)}
            for row in range(start, start + count)
        ]


def table_files(path: Path, split: str) -> list[TableFile]:
    """The files at a path, in order. Raises ConfigError where there are none, or of several splits."""
    try:
        opened: list[TableFile] = [
            ParquetTable(file) if file.suffix == ".parquet" else ArrowTable(file) for file in _found(path, split)
        ]
    except ImportError as error:
        raise ConfigError(FIELD, f"{path}, and no pyarrow", "pip install relax-core[tables]") from error
    except (OSError, ValueError) as error:  # pyarrow's errors are ValueErrors too
        raise ConfigError(FIELD, f"{path}: it can't be read ({error})", "name a Parquet or Arrow file") from error
    return opened


def _found(path: Path, split: str) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ConfigError(FIELD, f"{path}: there is no such file or folder", "name a table, or a folder of them")
    by_split: dict[str, list[Path]] = {}
    for file in sorted(file for suffix in SUFFIXES for file in path.rglob(f"*{suffix}")):
        if not file.name.startswith(("cache-", ".")):
            by_split.setdefault(_split_of(file, path), []).append(file)
    known = ", ".join(sorted(by_split)) or "none"
    if split:
        if split not in by_split:
            raise ConfigError("source.split", split, f"{path} has {known}")
        return by_split[split]
    if len(by_split) != 1:
        fix = 'choose one: source = { name = "files", split = ... }' if by_split else "name a folder with tables"
        raise ConfigError(FIELD, f"{path}, which has the splits {known}", fix)
    return next(iter(by_split.values()))


def _split_of(file: Path, root: Path) -> str:
    """A folder `datasets` saved is one split; hub folders name it in the file."""
    if (file.parent / "state.json").is_file():
        return file.parent.name if file.parent != root else "all"
    shard = _SHARD.match(file.stem)
    return shard.group(1) if shard else file.stem


def _heavy(leaf: Any) -> bool:
    """Whether a leaf holds bytes or samples of sound."""
    if leaf.physical_type == "BYTE_ARRAY":
        return str(leaf.logical_type.type) in ("NONE", "UNKNOWN")
    return leaf.physical_type in ("FLOAT", "DOUBLE") and f".{SAMPLES}." in leaf.path


def _has_sibling(path: str, kept: Sequence[str]) -> bool:
    """Whether something else of the same struct is read, which tells how many there are."""
    around = path.split(f".{SAMPLES}.")[0] if f".{SAMPLES}." in path else path.rpartition(".")[0]
    return any(other.startswith(f"{around}.") for other in kept)


def _mark(value: Any, path: Sequence[str]) -> None:
    if isinstance(value, list):
        for one in value:
            _mark(one, path)
    elif isinstance(value, dict) and path:
        rest = path[1:]
        if not rest or path[0] == SAMPLES:
            value[path[0]] = EMBEDDED
        elif value.get(path[0]) is not None:
            _mark(value[path[0]], rest)


def _light(scalar: Any) -> Any:
    """A scalar of Arrow as Python, its bytes and samples left where they are."""
    import pyarrow.types as kinds

    if not scalar.is_valid:
        return None
    if kinds.is_binary(scalar.type) or kinds.is_large_binary(scalar.type):
        return EMBEDDED
    if kinds.is_struct(scalar.type):
        names = [field.name for field in scalar.type]
        sound = {SAMPLES, "sampling_rate"} <= set(names)
        return {
            name: EMBEDDED if sound and name == SAMPLES and scalar[name].is_valid else _light(scalar[name])
            for name in names
        }
    if kinds.is_list(scalar.type) or kinds.is_large_list(scalar.type):
        return [_light(one) for one in scalar]
    return scalar.as_py()
