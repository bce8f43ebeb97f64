# SPDX-License-Identifier: Apache-2.0
"""Task sources: `jsonl` (JSON lines, or one JSON list), `table` (Parquet and Arrow files, or a folder of them) and `files`.

Every row is read once at `open` and checked; after that only its number is kept, so a resumed run goes on at the same task.
A row becomes a `Task` in `task_row`. To read another format, derive from `TaskFile` and name it in `TaskFiles.files`.
"""

from __future__ import annotations

import json
import os
import re
from abc import ABC, abstractmethod
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, ClassVar

from relax_core.api.component import OptionsT
from relax_core.api.errors import ConfigError
from relax_core.api.options import Options
from relax_core.api.source import BadRow, TaskSource
from relax_core.api.task import Task
from relax_core.config.tables import DataTable
from relax_core.data.task_row import EMBEDDED, MediaOrigin, RowError, row_task
from relax_core.media.access import SourceAccess
from relax_core.media.source import SAMPLES, arrow_batches

FIELD = "data"
SUFFIXES = (".parquet", ".arrow")
CACHED_BYTES = 64 << 20
"""Size of the blocks of a table that are kept, the last ones that were read; one is kept however large it is."""
AT_ONCE = 256
"""Rows that are Python objects at a time while a table is checked."""
_SHARD = re.compile(r"^(.*?)-\d+(?:-of-\d+)?(?:-[0-9a-f]+)?$")
_STEPS = ("list", "element", "item", "array_element")
"""Parquet's names for the way into a list."""


class TaskFiles(TaskSource[OptionsT]):
    """Tasks of one or more files.

    Invariants:
    - A row was usable when the files were opened, or is never issued; what is wrong with the others is told by `problems`.
    - Ids are unique, unless the configuration names their column.
    """

    @abstractmethod
    def files(self, path: Path) -> Sequence[TaskFile]:
        """Open the files at a path, in order. Raises ConfigError where there are none, or one is unreadable."""

    def open(self, path: str, columns: Mapping[str, str]) -> None:
        """Raises ConfigError at the first unusable row; the usable ones can be read all the same."""
        self._columns, self._bad, ids = dict(columns), list[BadRow](), set[str]()
        self._file, self._number = array("i"), array("q")
        self._files = self.files(Path(path))
        for at, file in enumerate(self._files):
            for number, row in _read_rows(file):
                try:
                    if isinstance(row, RowError):
                        raise row
                    task = self._task(file, number, row)
                    if "id" not in columns and task.id in ids:
                        raise RowError(f"id {task.id!r} is used twice")
                except RowError as error:
                    self._bad.append(BadRow(file.where(number), str(error)))
                    continue
                ids.add(task.id)
                self._file.append(at)
                self._number.append(number)
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

    def _task(self, file: TaskFile, number: int, row: Any) -> Task:
        return row_task(row, self._columns, f"{file.path.stem}:{number}", file.origin(number))


class TableOptions(Options):
    """`source = { name = "table", split = "train" }`."""

    split: str = ""
    """The split to read of a folder that holds several."""


class Files(TaskFiles[TableOptions]):
    """Tasks of a `.jsonl`, `.json`, `.parquet` or `.arrow` file, or of a dataset folder."""

    suffixes: ClassVar[tuple[str, ...]] = (".jsonl", ".json", *SUFFIXES)

    def files(self, path: Path) -> Sequence[TaskFile]:
        is_table = path.is_dir() or path.suffix in SUFFIXES
        return table_files(path, self.options.split) if is_table else [json_file(path)]


class JsonLines(TaskFiles[Options]):
    """Tasks of a `.jsonl` or `.json` file: an object a line, `{"prompt": text or messages, "answer": ...}`, or one list."""

    suffixes: ClassVar[tuple[str, ...]] = (".jsonl", ".json")

    def files(self, path: Path) -> Sequence[TaskFile]:
        return [json_file(path)]


class TableSource(TaskFiles[TableOptions]):
    """Tasks of Parquet files, and of dataset folders as `datasets` saves them (`save_to_disk`, or Parquet files)."""

    suffixes: ClassVar[tuple[str, ...]] = SUFFIXES

    def files(self, path: Path) -> Sequence[TaskFile]:
        return table_files(path, self.options.split)


# -- files of one format ----------------------------------------------------------------------------------------------


class TaskFile(ABC):
    """One file of tasks. Its rows have numbers, by which people and media find them."""

    example: ClassVar[str] = '{"prompt": ..., "answer": ...}'
    """Rows to write into one that has none."""
    label: ClassVar[str] = "{path}:{number}"

    def __init__(self, path: Path) -> None:
        self.path, self.absolute = path, str(path.absolute())

    @abstractmethod
    def rows(self) -> Iterator[tuple[int, Any]]:
        """Read every row once, with its number; a `RowError` stands for one that can't be read."""

    @abstractmethod
    def row(self, number: int) -> Any:
        """Read one row again. Raises ConfigError where the file was changed meanwhile."""

    def where(self, number: int) -> str:
        """Name a row for people."""
        return self.label.format(path=self.path, number=number)

    @abstractmethod
    def origin(self, number: int) -> MediaOrigin:
        """Name a row for the media that it holds."""


class LinesFile(TaskFile):
    """An object a line. Only the places of lines are kept."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._open, self._starts = path.open("rb"), array("q", [0])

    def rows(self) -> Iterator[tuple[int, Any]]:
        for number, line in enumerate(self._open, 1):
            self._starts.append(self._starts[-1] + len(line))
            if line.strip():
                yield number, _parsed(line)

    def row(self, number: int) -> Any:
        start, end = self._starts[number - 1 : number + 1]
        row = _parsed(os.pread(self._open.fileno(), end - start, start))
        if isinstance(row, RowError):
            raise ConfigError(FIELD, f"{self.where(number)}, changed since it was opened", "start again") from row
        return row

    def origin(self, number: int) -> MediaOrigin:
        return MediaOrigin(self.path.parent, self.absolute, self._starts[number - 1])


class ListFile(TaskFile):
    """One JSON list, which can't be read in part: its rows are kept, and carry their media."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._data, self._rows, self._line = path.read_bytes(), list[Any](), 0

    def rows(self) -> Iterator[tuple[int, Any]]:
        try:
            rows = json.loads(self._data)
        except (ValueError, RecursionError) as error:
            self._line = getattr(error, "lineno", 1)
            yield 0, RowError(f"malformed JSON: {error}")
            return
        finally:
            self._data = b""
        if not isinstance(rows, list):
            self._line = 1
            yield 0, RowError("a .json file holds one list; name objects a line .jsonl")
            return
        self._rows = rows
        yield from enumerate(rows, 1)

    def row(self, number: int) -> Any:
        return self._rows[number - 1]

    def where(self, number: int) -> str:
        return f"{self.path} item {number}" if number else f"{self.path}:{self._line}"

    def origin(self, number: int) -> MediaOrigin:
        return MediaOrigin(self.path.parent)


def _read_rows(file: TaskFile) -> Iterator[tuple[int, Any]]:
    """Read every row. Raises ConfigError where the file is damaged behind its header; pyarrow tells that in many types."""
    try:
        yield from file.rows()
    except (OSError, ValueError, TypeError, LookupError, ArithmeticError, NotImplementedError, MemoryError) as error:
        got = f"{file.path}: it can't be read ({type(error).__name__}: {error})"
        raise ConfigError(FIELD, got, "write the file again: it is damaged") from error


def json_file(path: Path) -> TaskFile:
    """Open a `.json` file as a list, any other as lines. Raises ConfigError where it can't be read."""
    try:
        return ListFile(path) if path.suffix == ".json" else LinesFile(path)
    except OSError as error:
        fix = "name a readable .jsonl or .json file of tasks"
        raise ConfigError(FIELD, f"{path}: {error.strerror}", fix) from error


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except UnicodeDecodeError as error:
        return RowError(f"not UTF-8: {error.reason} at byte {error.start}")
    except ValueError as error:
        return RowError(f"malformed JSON: {error}")
    except RecursionError:
        return RowError("malformed JSON: nested too deeply")


class BlockCache:
    """Blocks of tables that were read last, within `CACHED_BYTES`; one is kept however large it is."""

    def __init__(self) -> None:
        self.blocks: OrderedDict[tuple[Path, int], Any] = OrderedDict()
        self.size_bytes = 0

    def get(self, file: TableFile, number: int) -> Any:
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
    """One file of a table, read block by block (row groups, record batches) through a cache that the files share.

    Columns of bytes (media) are not read: `EMBEDDED` stands in their place.
    """

    example, label = "with the columns prompt and answer", "{path} row {number}"

    def __init__(self, path: Path, cache: BlockCache, sizes: Sequence[int]) -> None:
        super().__init__(path)
        self.cache, self._starts = cache, [0, *accumulate(sizes)]
        """First rows of the blocks [blocks + 1], and behind the last the number of rows."""

    @abstractmethod
    def block(self, number: int) -> Any:
        """Read a block, which the cache keeps while others are read."""

    @abstractmethod
    def block_rows(self, block: Any, start: int, count: int) -> list[dict[str, Any]]:
        """Give rows of a block as plain Python."""

    def rows(self) -> Iterator[tuple[int, Any]]:
        for number, (start, end) in enumerate(pairwise(self._starts)):
            block = self.block(number)
            for first in range(start, end, AT_ONCE):
                yield from enumerate(self.block_rows(block, first - start, min(AT_ONCE, end - first)), first + 1)

    def row(self, number: int) -> Any:
        at = bisect_right(self._starts, number - 1) - 1
        (row,) = self.block_rows(self.cache.get(self, at), number - 1 - self._starts[at], 1)
        return row

    def origin(self, number: int) -> MediaOrigin:
        return MediaOrigin(self.path.parent, self.absolute, number - 1)


class ParquetTable(TableFile):
    """A Parquet file, read by row groups without leaves of bytes."""

    def __init__(self, path: Path, cache: BlockCache) -> None:
        from pyarrow import parquet

        self._file = parquet.ParquetFile(path, pre_buffer=False)
        told = self._file.metadata
        super().__init__(path, cache, [told.row_group(number).num_rows for number in range(told.num_row_groups)])
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

    def block_rows(self, block: Any, start: int, count: int) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = block.slice(start, count).to_pylist()
        for row in found:
            for path in self._left:
                _mark(row, path)
        return found


class ArrowTable(TableFile):
    """An Arrow file, mapped whole; its record batches are read when they are looked at."""

    def __init__(self, path: Path, cache: BlockCache) -> None:
        self._batches = arrow_batches(str(path))
        super().__init__(path, cache, [batch.num_rows for batch in self._batches])

    def block(self, number: int) -> Any:
        self._batches[number].validate(full=True)  # reading through a wrong offset would end this process
        return self._batches[number]

    def block_rows(self, block: Any, start: int, count: int) -> list[dict[str, Any]]:
        names = block.schema.names
        return [
            {name: _light(column[row]) for name, column in zip(names, block.columns, strict=True)}
            for row in range(start, start + count)
        ]


def table_files(path: Path, split: str) -> list[TableFile]:
    """The files at a path, in order. Raises ConfigError where there are none, or of several splits."""
    cache = BlockCache()
    try:
        return [
            ParquetTable(file, cache) if file.suffix == ".parquet" else ArrowTable(file, cache)
            for file in _found(path, split)
        ]
    except ImportError as error:
        raise ConfigError(FIELD, f"{path}, and no pyarrow", "pip install relax-core[tables]") from error
    except (OSError, ValueError, TypeError, LookupError, ArithmeticError, NotImplementedError, MemoryError) as error:
        raise ConfigError(FIELD, f"{path}: it can't be read ({error})", "name a Parquet or Arrow file") from error


def source_access(data: DataTable, paths: Iterable[Path]) -> SourceAccess:
    """Bound the sources that rows of these task files may name: `[data.media]`, and the folder of each file."""
    folders = [str(folder) for folder in data.media.allowed_folders]
    for path in paths:
        folders += [str(path), str(path.parent)] if not path.is_dir() else [str(path)]
        # A table that is a link to elsewhere, as caches of hubs keep them, is itself named.
        folders += [str(file) for file in _tables(path) if file.is_symlink()] if path.is_dir() else []
    return SourceAccess(data.media.allowed_hosts, folders, data.media.fetch_timeout_s)


def _tables(folder: Path) -> list[Path]:
    return sorted(file for suffix in SUFFIXES for file in folder.rglob(f"*{suffix}"))


def _found(path: Path, split: str) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ConfigError(FIELD, f"{path}: there is no such file or folder", "name a table, or a folder of them")
    by_split: dict[str, list[Path]] = {}
    for file in _tables(path):
        if file.name.startswith(("cache-", ".")):
            continue
        shard = _SHARD.match(file.stem)
        split_name = shard.group(1) if shard else file.stem  # hub folders name the split in the file
        if (file.parent / "state.json").is_file():  # a folder that `datasets` saved is one split
            split_name = file.parent.name if file.parent != path else "all"
        by_split.setdefault(split_name, []).append(file)
    known = ", ".join(sorted(by_split)) or "none"
    if split:
        if split not in by_split:
            raise ConfigError("source.split", split, f"{path} has {known}")
        return by_split[split]
    if len(by_split) != 1:
        fix = 'choose one: source = { name = "files", split = ... }' if by_split else "name a folder with tables"
        raise ConfigError(FIELD, f"{path}, which has the splits {known}", fix)
    return next(iter(by_split.values()))


def _heavy(leaf: Any) -> bool:
    """Tell whether a leaf holds bytes or samples of sound."""
    if leaf.physical_type == "BYTE_ARRAY":
        return str(leaf.logical_type.type) in ("NONE", "UNKNOWN")
    return leaf.physical_type in ("FLOAT", "DOUBLE") and f".{SAMPLES}." in leaf.path


def _has_sibling(path: str, kept: Sequence[str]) -> bool:
    """Tell whether something else of the same struct is read, which tells how many there are."""
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
