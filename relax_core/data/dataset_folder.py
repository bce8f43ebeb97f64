# SPDX-License-Identifier: Apache-2.0
"""The layouts of dataset folders: which tables of a folder are one split of one configuration.

`datasets` saves a split as a folder with `state.json`. Hubs name splits in files and in folders, and configurations in
the folders above: `main/train-00000-of-00002.parquet` and `main/train/0000.parquet` are the split `train` of `main`.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

from relax_core.api.errors import ConfigError
from relax_core.data.unpacked_file import JSON_SUFFIXES, OTHER_SUFFIXES

SUFFIXES = (".parquet", ".arrow")
TEXT_SUFFIXES = (*JSON_SUFFIXES, *OTHER_SUFFIXES, ".ndjson", ".zst")
SPLITS = {
    "train": "train", "training": "train", "validation": "validation", "valid": "validation", "val": "validation",
    "dev": "validation", "test": "test", "testing": "test", "eval": "test", "evaluation": "test",
}  # fmt: skip
"""Names of splits that files and folders of dataset hubs have -> the usual name of the split."""
_SHARD = re.compile(r"^(.*?)-\d+(?:-of-(?P<count>\d+))?(?:-[0-9a-f]+)?$")
_NUMBERED = re.compile(r"^\d+(?:-of-\d+)?$")


def tables_in(folder: Path) -> list[Path]:
    """Return all tables of a folder and the folders below it, in order."""
    return sorted(file for suffix in SUFFIXES for file in folder.rglob(f"*{suffix}") if not _is_hidden(file, folder))


def tables_of(path: Path, split: str) -> list[Path]:
    """Return the tables of a split; an empty `split` selects the only split. A path to a file selects this file.

    Raises ConfigError for a split that does not exist, and if there are several splits or configurations to choose from.
    """
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ConfigError("data", f"{path}, which does not exist", "name a table file, or a folder of table files")
    tables: dict[str, dict[str, list[Path]]] = {}  # by split and configuration
    for file in tables_in(path):
        configuration, name = _place(file, path)
        tables.setdefault(name, {}).setdefault(configuration, []).append(file)
    splits = ", ".join(sorted(tables)) or "none"
    same = [split] if split in tables else [name for name in tables if _usual(name) == _usual(split)]
    if split and len(same) != 1:
        raise ConfigError("source.split", split, f"choose a split of {path}: {splits}")
    chosen = {name: tables[name] for name in (same if split else tables)}
    parts = sorted({configuration for files in chosen.values() for configuration in files})
    if len(parts) > 1:
        got = f"{path}, which has the configurations {', '.join(part or '.' for part in parts)}"
        raise ConfigError("data", got, f"name the folder of one configuration as the path, such as {path / parts[-1]}")
    others = [] if split or _usual(next(iter(tables), "")) not in ("validation", "test") else _unread(path, tables)
    if len(chosen) != 1 or others:
        lines = sorted(file.name for file in path.iterdir() if file.suffix in JSON_SUFFIXES)
        empty = f"name a file of the folder, such as {lines[0]}" if lines else "name a folder with tables"
        fix = 'choose one: source = { name = "files", split = ... }' if chosen else empty
        has = f"the splits {', '.join([splits, *others])}" if chosen else f"no tables ({', '.join(SUFFIXES)})"
        raise ConfigError("data", f"{path}, which has {has}", fix)
    files = next(iter(next(iter(chosen.values())).values()))
    # All files named like `train-00000-of-00003` must exist, and belong to one set.
    counts = [match["count"] for file in files if (match := _SHARD.match(file.stem)) and match["count"]]
    if counts and set(map(int, counts)) != {len(counts)}:
        has = f"{len(counts)} of the split's shards, whose names say {' and '.join(sorted(set(counts)))}"
        fix = "complete the folder, or merge the shards that you want into one file and name the file"
        raise ConfigError("data", f"{min(files).parent}, which has {has}", fix)
    return files


def _is_hidden(file: Path, folder: Path) -> bool:
    """Return True for caches of `datasets`, and for hidden files and files in hidden folders."""
    return file.name.startswith("cache-") or any(part.startswith(".") for part in file.relative_to(folder).parts)


def _place(file: Path, root: Path) -> tuple[str, str]:
    """Return the configuration and the split of a file."""
    folders, shard = list(file.relative_to(root).parts[:-1]), _SHARD.match(file.stem)
    named = [number for number, folder in enumerate(folders) if folder.lower() in SPLITS]
    split = "" if _NUMBERED.match(file.stem) else shard[1] if shard else file.stem
    if (file.parent / "state.json").is_file():  # a folder that `datasets` saved is one split
        split = folders.pop() if folders else "all"
    elif split.lower() not in SPLITS and named:
        split, folders = folders[named[-1]], folders[: named[-1]]
    elif not split:
        split = folders.pop() if folders else "all"
    if folders and _usual(folders[-1]) == _usual(split):
        folders.pop()
    return "/".join(folders), split


def _usual(split: str) -> str:
    return SPLITS.get(split.lower(), split)


def _unread(path: Path, splits: Collection[str]) -> list[str]:
    """Return other splits of a folder that are in files of text, which a folder of tables leaves out."""
    usual = {_usual(name) for name in splits}
    others = []
    for file in sorted(path.rglob("*")):
        name = _place(file.with_name(file.name.partition(".")[0]), path)[1]
        if name in SPLITS and _usual(name) not in usual and file.suffix in TEXT_SUFFIXES and not _is_hidden(file, path):
            others.append(f"{name} ({file.name})")
    return others
