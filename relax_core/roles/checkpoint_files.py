# SPDX-License-Identifier: Apache-2.0
"""The list of a checkpoint's files with their sizes and checksums, by which a damaged checkpoint is told from a whole one.

The list is written last, right before a checkpoint gets its name. It guards against what happens to files afterwards:
a truncated copy, a bad disk, a file that somebody removed. It is no signature: who may write the directory may forge it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import xxhash

from relax_core.observe.documents import sync_to_disk

LIST = "files.json"
SCHEMA = "relax.checkpoint-files/1"
READ_BYTES = 8 << 20

Files = Mapping[str, tuple[int, str]]
"""Size and xxh3-128 of each file by its path below the checkpoint."""


def checksums(checkpoint: Path) -> Files:
    """Read every file below a directory; all of them, and the names in its folders, are on disk then. Raises OSError."""
    files = {}
    for path in sorted(checkpoint.rglob("*")):
        if path.is_file():
            files[path.relative_to(checkpoint).as_posix()] = (path.stat().st_size, _checksum(path))
        sync_to_disk(path)
    return files


def write_list(checkpoint: Path, files: Files) -> None:
    """Write the list into its directory, and bring it to the disk. Raises OSError."""
    (checkpoint / LIST).write_text(json.dumps({"schema": SCHEMA, "hash": "xxh3-128", "files": files}, indent=1))
    sync_to_disk(checkpoint / LIST)
    sync_to_disk(checkpoint)


def find_damage(checkpoint: Path) -> str:
    """Compare the files with the list, and say what is wrong with the first that differs; empty where none does.

    Sizes come first: they cost nothing, and most damage shows in them.
    """
    try:
        listed = json.loads((checkpoint / LIST).read_text())["files"]
        wanted = {str(name): (int(size), str(checksum)) for name, (size, checksum) in listed.items()}
    except FileNotFoundError:
        return f"{LIST}: it is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        return f"{LIST}: it can't be read ({type(error).__name__}: {error})"
    try:
        for name, (size, _) in wanted.items():
            if not (checkpoint / name).is_file():
                return f"{name}: it is missing"
            if (found := (checkpoint / name).stat().st_size) != size:
                return f"{name}: it has {found} bytes where {size} were written"
        for name, (_, checksum) in wanted.items():
            if _checksum(checkpoint / name) != checksum:
                return f"{name}: its checksum is not that of the bytes that were written"
    except OSError as error:
        return f"{name}: it can't be read ({error.strerror or error})"
    return ""


def _checksum(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(READ_BYTES):
            digest.update(block)
    return digest.hexdigest()
