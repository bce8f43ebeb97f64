# SPDX-License-Identifier: Apache-2.0
"""Task sources: `jsonl` (JSON lines or a JSON list), `table` (Parquet and Arrow files or folders), `files` (all these).

`open` reads and checks every row once. Tasks are then read by number, so a resumed run continues at the same task.
`task_row` turns a row into a `Task`. For a new format, derive from `TaskFile` and `TaskFiles`.
"""

from __future__ import annotations

import fcntl
import os
from abc import ABC, abstractmethod
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from relax_core.api.component import OptionsT
from relax_core.api.errors import ConfigError
from relax_core.api.options import Options
from relax_core.api.source import BadRow, TaskSource
from relax_core.api.task import Task
from relax_core.config.tables import DataTable
from relax_core.data.dataset_folder import SUFFIXES, tables_in, tables_of
from relax_core.data.plain_data import EMBEDDED, Embedded, UnreadableValue, read_json
from relax_core.data.task_row import SHOWN, MediaOrigin, RowError, row_task
from relax_core.data.unpacked_file import JSON_SUFFIXES, PACKED_SUFFIXES, unpacked
from relax_core.media.access import SourceAccess
from relax_core.media.source import ROWS_AT_ONCE, SAMPLES, arrow_batches

FIELD = "data"
CACHED_BYTES = 64 << 20
"""Size limit of the cache of table blocks, in bytes. The block that was read last is cached, however large."""
AT_ONCE = 256
"""Number of rows that are converted to Python objects at a time while a table is checked."""
VALUE_BYTES = 64
"""Assumed size of a value without its bytes, for the limit of the cache."""
PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
"""Number of Arrow's time units in a second."""
_STEPS = ("list", "element", "item", "array_element")
"""Path steps that Parquet writers insert for the elements of a list."""


class TaskFiles(TaskSource[OptionsT]):
    """Tasks of one or more files.

    Invariants:
    - Only rows that were usable when the files were opened are issued; `problems` lists every unusable row.
    - Task ids are unique, unless the configuration names the column of ids.
    """

    @abstractmethod
    def files(self, path: Path) -> Sequence[TaskFile]:
        """Open the files at a path, in order. Raises ConfigError for a missing or unreadable file."""

    def open(self, path: str, columns: Mapping[str, str]) -> None:
        """Read and check every row. Raises ConfigError naming the first unusable row; usable rows can still be read."""
        self._columns, self._bad, ids = dict(columns), list[BadRow](), set[str]()
        self._file, self._number = array("i"), array("q")
        self._faults = dict[str, tuple[int, str]]()
        self._files, unseen = self.files(Path(path)), {name: column for name, column in columns.items() if column}
        for file_index, file in enumerate(self._files):
            for number, row in _read_rows(file):
                try:
                    if isinstance(row, RowError):
                        raise row
                    if unseen and isinstance(row, dict):
                        unseen = {name: column for name, column in unseen.items() if column not in row}
                    faults: dict[str, str] = {}
                    task = self._task(file, number, row, faults)
                    if "id" not in columns and task.id in ids:
                        raise RowError(f"id {task.id!r} is used twice")
                except RowError as error:
                    self._bad.append(BadRow(file.where(number), str(error)))
                    continue
                ids.add(task.id)
                for column, reason in faults.items():
                    count, example = self._faults.get(column, (0, f"{file.where(number)}: {reason}"))
                    self._faults[column] = count + 1, example
                self._file.append(file_index)
                self._number.append(number)
        if self._number:
            self._bad += [BadRow(path, f"no row has the column {column!r}, which `columns` names for {name!r}", "columns")
                          for name, column in unseen.items()]  # fmt: skip
        if self._bad:
            first, others = self._bad[0], len(self._bad) - 1
            got = f"{first.where}: {first.reason}" + (f" (and {others} more bad rows)" if others else "")
            raise ConfigError(FIELD, got, f"correct the file; `relax data check {path}` lists every bad row")
        if not self._number:
            raise ConfigError(FIELD, f"{path}, which holds no rows", f"write rows {self._files[0].example}")

    def __len__(self) -> int:
        return len(self._number)

    def __getitem__(self, index: int) -> Task:
        if not 0 <= index < len(self):
            raise IndexError(index)
        file, number = self._files[self._file[index]], self._number[index]
        return self._task(file, number, file.row(number))

    def where(self, index: int) -> str:
        return self._files[self._file[index]].where(self._number[index])

    def problems(self) -> Iterator[BadRow]:
        return iter(self._bad)

    def remarks(self) -> Iterator[str]:
        for column, (count, first) in self._faults.items():
            yield (
                f"column {column!r} has {count} values that tasks can't hold, the first at {first}; a half of a surrogate "
                "pair is read as U+FFFD, any other such value as None"
            )

    def _task(self, file: TaskFile, number: int, row: Any, faults: dict[str, str] | None = None) -> Task:
        try:
            return row_task(row, self._columns, f"{file.stem}:{number}", file.origin(number), faults)
        except RecursionError:
            raise RowError("nested too deeply") from None


class TableSourceOptions(Options):
    """Options of a table source: `source = { name = "table", split = "train" }`."""

    split: str = ""
    """Split to read from a folder with several splits; empty reads the only split."""


class Files(TaskFiles[TableSourceOptions]):
    """Tasks of a `.jsonl`, `.json`, `.parquet` or `.arrow` file, or of a dataset folder."""

    suffixes: ClassVar[tuple[str, ...]] = (*JSON_SUFFIXES, *SUFFIXES)

    def files(self, path: Path) -> Sequence[TaskFile]:
        is_table = path.is_dir() or path.suffix in SUFFIXES
        return table_files(path, self.options.split, self._columns.values()) if is_table else [json_file(path)]


class JsonLines(TaskFiles[Options]):
    """Tasks of a `.jsonl` file, one object per line, or of a `.json` file with one list of objects.

    An object is `{"prompt": text or messages, "answer": ...}`.
    """

    suffixes: ClassVar[tuple[str, ...]] = JSON_SUFFIXES

    def files(self, path: Path) -> Sequence[TaskFile]:
        return [json_file(path)]


class TableSource(TaskFiles[TableSourceOptions]):
    """Tasks of Parquet or Arrow files, and of folders that `datasets` saved (`save_to_disk`, or Parquet files)."""

    suffixes: ClassVar[tuple[str, ...]] = SUFFIXES

    def files(self, path: Path) -> Sequence[TaskFile]:
        return table_files(path, self.options.split, self._columns.values())


# -- files of one format ----------------------------------------------------------------------------------------------


class TaskFile(ABC):
    """A file of tasks. Error messages and references to media name its rows by number."""

    example: ClassVar[str] = '{"prompt": ..., "answer": ...}'
    """Description of a valid row, for the error that a file is empty."""
    label: ClassVar[str] = "{path}:{number}"
    """Format string for a row's location in error messages."""

    def __init__(self, path: Path) -> None:
        self.path, self.stem, self.folder, self.absolute = path, path.stem, path.absolute().parent, str(path.absolute())

    @abstractmethod
    def rows(self) -> Iterator[tuple[int, object]]:
        """Yield every row with its number; yield a `RowError` for a row that can't be read."""

    @abstractmethod
    def row(self, number: int) -> object:
        """Read one row again. Raises ConfigError if the file was changed since it was opened."""

    def where(self, number: int) -> str:
        """Return the location of a row for error messages."""
        return self.label.format(path=self.path, number=number)

    @abstractmethod
    def origin(self, number: int) -> MediaOrigin:
        """Return the location of a row for references to its media."""


class LinesFile(TaskFile):
    """A file with one JSON object per line. Only the byte offsets of the lines are kept in memory."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._open, self._packed = unpacked(path)
        self._starts = array("q", [0])
        try:
            fcntl.flock(self._open, fcntl.LOCK_SH | fcntl.LOCK_NB)
            fcntl.flock(self._open, fcntl.LOCK_UN)
        except BlockingIOError as error:
            self._open.close()
            fix = "wait for the end of that process, such as a `relax rollout`"
            raise ConfigError(FIELD, f"{path}, which another process writes", fix) from error
        except OSError:  # a file system without locks
            pass

    def rows(self) -> Iterator[tuple[int, object]]:
        for number, line in enumerate(self._open, 1):
            self._starts.append(self._starts[-1] + len(line))
            if line.strip():
                yield number, _parsed(line)

    def row(self, number: int) -> object:
        start, end = self._starts[number - 1 : number + 1]
        row = _parsed(os.pread(self._open.fileno(), end - start, start))
        if isinstance(row, RowError):
            raise ConfigError(FIELD, f"{self.where(number)}, changed since the start", "start the run again") from row
        return row

    def origin(self, number: int) -> MediaOrigin:
        if self._packed:
            return MediaOrigin(self.folder)
        return MediaOrigin(self.folder, self.absolute, self._starts[number - 1])


class ListFile(TaskFile):
    """A file with one JSON list. It can't be read in part, so all rows stay in memory, and tasks carry media bytes."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        with unpacked(path)[0] as file:
            self._data, self._rows, self._line = file.read(), list[Any](), 0

    def rows(self) -> Iterator[tuple[int, object]]:
        try:
            rows = read_json(self._data)
        except (ValueError, RecursionError) as error:
            self._line = getattr(error, "lineno", 1)
            yield 0, RowError(f"malformed JSON: {error}")
            return
        finally:
            self._data = b""
        if not isinstance(rows, list):
            self._line = 1
            yield 0, RowError("a .json file holds one list; rename a file with one object per line to .jsonl")
            return
        self._rows = rows
        yield from enumerate(rows, 1)

    def row(self, number: int) -> object:
        return self._rows[number - 1]

    def where(self, number: int) -> str:
        return f"{self.path} item {number}" if number else f"{self.path}:{self._line}"

    def origin(self, number: int) -> MediaOrigin:
        return MediaOrigin(self.folder)


def _read_rows(file: TaskFile) -> Iterator[tuple[int, object]]:
    """Yield every row. Raises ConfigError for a damaged file, which pyarrow reports by errors of many types."""
    try:
        yield from file.rows()
    except (OSError, ValueError, TypeError, LookupError, ArithmeticError, NotImplementedError, MemoryError) as error:
        got = f"{file.path}, which can't be read ({type(error).__name__}: {error})"
        raise ConfigError(FIELD, got, "the file is damaged: write it again") from error


def json_file(path: Path) -> TaskFile:
    """Open a file as a list if it is named `.json`, else as lines. Raises ConfigError if it can't be read."""
    suffix = Path(path.stem).suffix if path.suffix in PACKED_SUFFIXES else path.suffix
    try:
        return ListFile(path) if suffix == ".json" else LinesFile(path)
    except OSError as error:
        fix = "name a readable .jsonl or .json file of tasks"
        raise ConfigError(FIELD, f"{path}: {error.strerror or error}", fix) from error


def _parsed(line: bytes) -> object:
    try:
        return read_json(line)
    except UnicodeDecodeError as error:
        return RowError(f"not UTF-8: {error.reason} at byte {error.start}")
    except ValueError as error:
        return RowError(f"malformed JSON: {error}")
    except RecursionError:
        return RowError("malformed JSON: nested too deeply")


class BlockCache:
    """The table blocks that were read last, within `CACHED_BYTES`. At least one block is cached, however large."""

    def __init__(self) -> None:
        self.blocks: OrderedDict[tuple[Path, int], ParquetBlock | CheckedBatch] = OrderedDict()
        self.size_bytes = 0

    def get(self, file: TableFile, number: int) -> ParquetBlock | CheckedBatch:
        key = file.path, number
        if key in self.blocks:
            self.blocks.move_to_end(key)
            return self.blocks[key]
        block = self.blocks[key] = file.block(number)
        self.size_bytes += block.nbytes
        while self.size_bytes > CACHED_BYTES and len(self.blocks) > 1:
            self.size_bytes -= self.blocks.popitem(last=False)[1].nbytes
        return block


class TableFile(TaskFile):
    """A file of a table, read block by block (row group or record batch) through a cache that the table's files share.

    Columns of bytes (media) are not read: rows have the stand-in `EMBEDDED` as their values.
    """

    example, label = "with the columns prompt and answer", "{path} row {number}"

    def __init__(self, path: Path, cache: BlockCache, sizes: Sequence[int]) -> None:
        super().__init__(path)
        self.cache, self._starts = cache, [0, *accumulate(sizes)]
        """Index of each block's first row, then the total number of rows: [blocks + 1]."""

    @abstractmethod
    def block(self, number: int) -> ParquetBlock | CheckedBatch:
        """Read a block from the file, without the cache."""

    @abstractmethod
    def block_rows(self, block: Any, start: int, count: int) -> list[dict[str, object]]:
        """Return `count` rows of a block, from row `start` on, as plain Python."""

    def rows(self) -> Iterator[tuple[int, object]]:
        for number, (start, end) in enumerate(pairwise(self._starts)):
            block = self.block(number)
            for first in range(start, end, AT_ONCE):
                yield from enumerate(self.block_rows(block, first - start, min(AT_ONCE, end - first)), first + 1)

    def row(self, number: int) -> object:
        block = bisect_right(self._starts, number - 1) - 1
        (row,) = self.block_rows(self.cache.get(self, block), number - 1 - self._starts[block], 1)
        return row

    def origin(self, number: int) -> MediaOrigin:
        return MediaOrigin(Path(self.absolute).parent, self.absolute, number - 1)


class UnreadLeaf(NamedTuple):
    """A Parquet leaf whose bytes or sound samples are not read with its row group."""

    number: int
    """Index of the leaf in the file."""
    steps: list[str]
    """Column and fields that lead to the bytes, without the steps through lists."""
    alone: bool
    """True if no other field of the bytes' struct is read, so that the number of structs in a list is unknown."""


class ParquetBlock(NamedTuple):
    """A row group without bytes and sound samples."""

    table: Any
    marks: list[tuple[list[str], Embedded | None]]
    """The steps of each leaf that was not read, with the value in its place: None if the leaf has only nulls."""
    columns: dict[str, list[object]]
    """Values of the columns in which only some bytes are null; the bytes were read and dropped."""

    @property
    def nbytes(self) -> int:
        return int(self.table.nbytes) + sum(len(values) for values in self.columns.values()) * VALUE_BYTES


class ParquetTable(TableFile):
    """A Parquet file, read one row group at a time. Columns of bytes and audio samples are not kept."""

    def __init__(self, path: Path, cache: BlockCache, shown: Collection[str] = ()) -> None:
        """Open a file. `shown`: columns that may hold media which the model reads."""
        from pyarrow import parquet

        self._file, self._shown = parquet.ParquetFile(path, pre_buffer=False), shown
        metadata = self._file.metadata
        super().__init__(
            path, cache, [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
        )
        self._names: list[str] = list(self._file.schema_arrow.names)
        leaves = [self._file.schema.column(number) for number in range(len(self._file.schema))]
        heavy = {leaf.path: number for number, leaf in enumerate(leaves) if _heavy(leaf)}
        self._kept = [leaf.path for leaf in leaves if leaf.path not in heavy]
        self._left = [
            UnreadLeaf(
                number,
                [step for depth, step in enumerate(path.split(".")) if depth == 0 or step not in _STEPS],
                "." in path and not _has_sibling(path, self._kept),
            )
            for path, number in heavy.items()
        ]

    def block(self, number: int) -> ParquetBlock:
        from pyarrow import parquet

        table = self._file.read_row_group(number, columns=self._kept, use_threads=False)
        block = ParquetBlock(table, [], {})
        for leaf in self._left:
            filled, column = self._filled(number, leaf, table), leaf.steps[0]
            if filled is not None or column not in self._shown:
                block.marks.append((leaf.steps, None if filled is False else EMBEDDED))
            elif column not in block.columns:  # read in small batches, and keep the values without the bytes
                with parquet.ParquetFile(self.path, pre_buffer=False, buffer_size=1 << 20) as file:
                    batches = file.iter_batches(ROWS_AT_ONCE, [number], [column], use_threads=False)
                    block.columns[column] = [_light(value) for batch in batches for value in batch.column(0)]
        return block

    def _filled(self, number: int, leaf: UnreadLeaf, table: Any) -> bool | None:
        """Return True if a leaf is never null where its struct is present, False if always, None if unknown."""
        statistics = self._file.metadata.row_group(number).column(leaf.number).statistics
        if leaf.alone or statistics is None or not statistics.has_null_count:
            return None
        try:
            present, absent = _structs(table, leaf.steps[:-1])
        except (LookupError, ValueError, NotImplementedError):  # bytes in a map or another rare type
            return None
        if statistics.null_count in (0, absent):
            return True
        is_sound = SAMPLES in leaf.steps  # Parquet counts an array without samples as null
        return False if statistics.null_count == absent + present and not is_sound else None

    def block_rows(self, block: ParquetBlock, start: int, count: int) -> list[dict[str, object]]:
        try:
            rows: list[dict[str, object]] = block.table.slice(start, count).to_pylist()
        except (
            ValueError,
            LookupError,
            ArithmeticError,
            NotImplementedError,
        ):  # a value that Python lacks
            columns = zip(block.table.column_names, block.table.columns, strict=True)
            rows = list(_rows_of({name: column.slice(start, count) for name, column in columns}, count))
        for number, row in enumerate(rows, start):
            for steps, value in block.marks:
                _mark(row, steps, value)
            row.update((name, values[number]) for name, values in block.columns.items())
        return rows


class ArrowTable(TableFile):
    """An Arrow file, memory-mapped whole. Record batches are read from the disk on access."""

    def __init__(self, path: Path, cache: BlockCache) -> None:
        self._batches = arrow_batches(str(path))
        super().__init__(path, cache, [batch.num_rows for batch in self._batches])

    def block(self, number: int) -> CheckedBatch:
        return CheckedBatch.of(self._batches[number])

    def block_rows(self, block: CheckedBatch, start: int, count: int) -> list[dict[str, object]]:
        rows = list(_rows_of({name: column.slice(start, count) for name, column in block.columns.items()}, count))
        return [{**row, **block.broken} for row in rows]


class CheckedBatch(NamedTuple):
    """A record batch whose columns are safe to read: a wrong offset in a column would crash this process."""

    columns: dict[str, Any]
    broken: dict[str, UnreadableValue]
    """Columns that are not safe to read."""
    nbytes: int

    @classmethod
    def of(cls, batch: Any) -> CheckedBatch:
        """Check every column of a batch, with a column's content."""
        import pyarrow as pa

        columns, broken = {}, {}
        bytes_of = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary()}
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            try:  # text is validated as bytes, so that its encoding is not checked
                as_bytes = column.view(bytes_of[column.type]) if column.type in bytes_of else column
                as_bytes.validate(full=True)
                columns[name] = column
            except pa.ArrowException as error:
                broken[name] = UnreadableValue(f"is damaged: {error}")
        return cls(columns, broken, sum(column.nbytes for column in columns.values()))


def table_files(path: Path, split: str, mapped: Collection[str] = ()) -> list[TableFile]:
    """Open the tables at a path, in order. Raises ConfigError for a path without tables or with several splits.

    `mapped`: columns of the file that `data.columns` names; these columns may hold media.
    """
    cache, shown = BlockCache(), SHOWN.union(mapped)
    try:
        return [
            ParquetTable(file, cache, shown) if file.suffix == ".parquet" else ArrowTable(file, cache)
            for file in tables_of(path, split)
        ]
    except ImportError as error:
        raise ConfigError(FIELD, f"{path}, but pyarrow is not installed", "pip install relax-core[tables]") from error
    except (OSError, ValueError, TypeError, LookupError, ArithmeticError, NotImplementedError, MemoryError) as error:
        raise ConfigError(FIELD, f"{path}, which can't be read ({error})", "name a Parquet or Arrow file") from error


def source_access(data: DataTable, paths: Iterable[Path]) -> SourceAccess:
    """Return the limits on media sources in these task files: `[data.media]`, plus the folder of each file."""
    folders = [str(folder) for folder in data.media.allowed_folders]
    for path in (path.absolute() for path in paths):  # media are read by processes that work in other folders
        folders += [str(path), str(path.parent)] if not path.is_dir() else [str(path)]
        # A table may be a link out of its folder, as in the caches of hubs: allow the link's target.
        folders += [str(file) for file in tables_in(path) if file.is_symlink()] if path.is_dir() else []
    return SourceAccess(data.media.allowed_hosts, folders, data.media.fetch_timeout_s)


def _heavy(leaf: Any) -> bool:
    """Return True if a Parquet leaf holds bytes or sound samples."""
    if leaf.physical_type == "BYTE_ARRAY":
        return str(leaf.logical_type.type) in ("NONE", "UNKNOWN")
    return leaf.physical_type in ("FLOAT", "DOUBLE") and f".{SAMPLES}." in leaf.path


def _has_sibling(path: str, kept: Sequence[str]) -> bool:
    """Return True if a further field of the leaf's struct is read; that field gives the number of structs in a list."""
    around = path.split(f".{SAMPLES}.")[0] if f".{SAMPLES}." in path else path.rpartition(".")[0]
    return any(other.startswith(f"{around}.") for other in kept)


def _structs(table: Any, steps: Sequence[str]) -> tuple[int, int]:
    """Return the number of structs at these steps, and the number of nulls that Parquet counts in places without a struct."""
    import pyarrow.compute as pc
    import pyarrow.types as kinds

    values, absent = table, 0
    for step in steps:
        column = table[step] if values is table else pc.struct_field(values, step)
        while kinds.is_list(column.type) or kinds.is_large_list(column.type) or kinds.is_fixed_size_list(column.type):
            absent += len(column) - (pc.sum(pc.greater(pc.list_value_length(column), 0)).as_py() or 0)
            column = pc.list_flatten(column)
        absent += column.null_count
        values = column.drop_null()
    return len(values), absent


def _mark(value: Any, path: Sequence[str], mark: Embedded | None) -> None:
    """Put `mark` in the place of bytes that were not read."""
    if isinstance(value, list):
        for item in value:
            _mark(item, path, mark)
    elif isinstance(value, dict) and path:
        rest = path[1:]
        if not rest or path[0] == SAMPLES or path[0] not in value:
            value[path[0]] = mark
        elif value[path[0]] is not None:
            _mark(value[path[0]], rest, mark)


def _rows_of(columns: Mapping[str, Any], count: int) -> Iterator[dict[str, object]]:
    """Yield the first `count` rows of Arrow columns, by name, as Python values."""
    for row in range(count):
        yield {name: _light(column[row]) for name, column in columns.items()}


def _light(scalar: Any) -> object:
    """Convert an Arrow scalar to a Python value, with `EMBEDDED` in place of bytes and sound samples.

    A value that Python can't represent becomes text if Arrow can write it as text, else `UnreadableValue`.
    """
    import pyarrow.types as kinds

    if not scalar.is_valid:
        return None
    if kinds.is_binary(scalar.type) or kinds.is_large_binary(scalar.type):
        return EMBEDDED
    if kinds.is_struct(scalar.type):
        names = [field.name for field in scalar.type]
        if len(set(names)) < len(names):
            return UnreadableValue(f"has several fields with one name: {', '.join(names)}")
        sound = {SAMPLES, "sampling_rate"} <= set(names)
        return {
            name: EMBEDDED if sound and name == SAMPLES and scalar[name].is_valid else _light(scalar[name])
            for name in names
        }
    if kinds.is_list(scalar.type) or kinds.is_large_list(scalar.type):
        return [_light(item) for item in scalar]
    try:
        return scalar.as_py()
    except (ValueError, LookupError, ArithmeticError, NotImplementedError) as error:
        return _written(scalar) or UnreadableValue(f"can't be read ({error})")


def _written(scalar: Any) -> str | float | None:
    """Return a time, date or duration beyond Python's range or precision as text or seconds; else None."""
    import pyarrow as pa
    import pyarrow.types as kinds

    if kinds.is_duration(scalar.type):
        return float(scalar.value) / PER_SECOND[scalar.type.unit]
    if not kinds.is_temporal(scalar.type):
        return None
    try:
        written = str(scalar.cast(pa.string()).as_py())
    except pa.ArrowException:
        return None
    return None if "out of range" in written else written.replace(" ", "T")
