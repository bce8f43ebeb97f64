# SPDX-License-Identifier: Apache-2.0
"""Which files a table is made of, and their rows block by block: `.parquet` and `.arrow` files, or a folder of them.

Columns of bytes (media) are not read: what stands in them is named `EMBEDDED`. A block is a row group of a Parquet file, or
a record batch of an Arrow file, which is mapped.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from relax_core.api.errors import ConfigError
from relax_core.api.media_cell import SAMPLES, arrow_batches
from relax_core.rollout.row_media import EMBEDDED

FIELD = "data"
SUFFIXES = (".parquet", ".arrow")
_SHARD = re.compile(r"^(.*?)-\d+(?:-of-\d+)?(?:-[0-9a-f]+)?$")
_STEPS = ("list", "element", "item", "array_element")
"""What Parquet calls the way into a list."""


class TableFile(ABC):
    """One file."""

    def __init__(self, path: Path, sizes: Sequence[int]) -> None:
        self.path = path
        self.starts = [0, *accumulate(sizes)]
        """[blocks + 1] where each begins."""

    @abstractmethod
    def block(self, number: int) -> Any:
        """What `rows` takes; whoever asks keeps it while it reads on."""

    @abstractmethod
    def rows(self, block: Any, start: int, count: int) -> list[dict[str, Any]]:
        """Rows of a block as plain Python."""


class ParquetTable(TableFile):
    """Read by row groups, without leaves of bytes."""

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
    """Mapped whole; pages come when they are looked at."""

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


def is_table(path: Path) -> bool:
    """Whether a path is for the table source."""
    return path.is_dir() or path.suffix in SUFFIXES


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
    """Bytes, or samples of sound."""
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


def stretches(size: int, count: int) -> Iterator[tuple[int, int]]:
    """(start, count) of pieces."""
    return ((start, min(count, size - start)) for start in range(0, size, count))
