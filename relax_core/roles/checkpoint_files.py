# SPDX-License-Identifier: Apache-2.0
"""The list of a checkpoint's files with sizes and checksums, which reveals damage.

The list is written last, right before the checkpoint gets its final name. It detects later damage: a truncated copy, a
bad disk, a removed file. It is not a signature: a process that may write to the directory can forge it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import xxhash

from relax_core.observe.files import sync_to_disk

LIST = "files.json"
SCHEMA = "relax.checkpoint-files/1"
READ_BYTES = 8 << 20

Files = Mapping[str, tuple[int, str]]
"""Size in bytes and xxh3-128 checksum of each file, by path relative to the checkpoint."""


def checksums(checkpoint: Path) -> Files:
    """Compute size and checksum of every file below a directory, and sync files and folders to disk. Raises OSError."""
    files = {}
    for path in sorted(checkpoint.rglob("*")):
        if path.is_file():
            files[path.relative_to(checkpoint).as_posix()] = (path.stat().st_size, _checksum(path))
        sync_to_disk(path)
    return files


def write_list(checkpoint: Path, files: Files) -> None:
    """Write the list into the checkpoint, and sync list and folder to disk. Raises OSError."""
    (checkpoint / LIST).write_text(json.dumps({"schema": SCHEMA, "hash": "xxh3-128", "files": files}, indent=1))
    sync_to_disk(checkpoint / LIST)
    sync_to_disk(checkpoint)


def find_damage(checkpoint: Path) -> str:
    """Compare the files with the list; describe the first file that differs, or return an empty string.

    Sizes are compared before checksums, since comparing sizes is fast and finds most damage.
    """
    try:
        listed = json.loads((checkpoint / LIST).read_text())["files"]
        wanted = {str(name): (int(size), str(checksum)) for name, (size, checksum) in listed.items()}
    except FileNotFoundError:
        return f"{LIST} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        return f"{LIST} can't be read ({type(error).__name__}: {error})"
    try:
        for name, (size, _) in wanted.items():
            if not (checkpoint / name).is_file():
                return f"{name} is missing"
            if (found := (checkpoint / name).stat().st_size) != size:
                return f"{name} has {found} bytes, but {size} were written"
        for name, (_, checksum) in wanted.items():
            if _checksum(checkpoint / name) != checksum:
                return f"{name} has a different checksum than when it was written"
    except OSError as error:
        return f"{name} can't be read ({error.strerror or error})"
    return ""


def _checksum(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(READ_BYTES):
            digest.update(block)
    return digest.hexdigest()
