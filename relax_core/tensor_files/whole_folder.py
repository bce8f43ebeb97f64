# SPDX-License-Identifier: Apache-2.0
"""Atomic replacement of a folder, such as an exported model, by a new folder.

The replacement takes two renames, and a process may be killed between them. The next writer, or the next start of the
run, then calls `finish_replacement`, which sees from the names which of the two folders is whole.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def new_folder(final: Path) -> Iterator[Path]:
    """Yield a new folder to write to; at the end, sync it to the disk and put it in the place of `final`.

    An error while writing leaves `final` as it was. Raises OSError.
    """
    finish_replacement(final)
    unfinished = final.with_name(f".{final.name}.{os.getpid()}.tmp")
    try:
        unfinished.mkdir(parents=True)
        yield unfinished
        for path in (*unfinished.rglob("*"), unfinished):
            _sync(path)
        replace_folder(unfinished, final)
        _sync(final.parent)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def replace_folder(unfinished: Path, final: Path) -> None:
    """Put a finished folder in the place of `final`. Raises OSError and then leaves `final` as it was."""
    before = final.with_name(f".{final.name}.{os.getpid()}.old")
    if final.exists():
        final.rename(before)
    try:
        unfinished.rename(final)
    except OSError:
        with contextlib.suppress(OSError):  # raise the first error instead
            before.rename(final)
        raise
    shutil.rmtree(before, ignore_errors=True)


def finish_replacement(final: Path) -> None:
    """Finish a replacement that a killed process left half done, and delete its leftovers. Raises OSError.

    The old folder is moved aside only after the new folder is on disk. So if both exist, the new folder wins.
    """
    for before in sorted(final.parent.glob(f".{final.name}.*.old")):
        if not final.exists():
            written = before.with_suffix(".tmp")
            (written if written.is_dir() else before).rename(final)
            _sync(final.parent)
        shutil.rmtree(before, ignore_errors=True)
    for left in final.parent.glob(f".{final.name}.*.tmp"):
        shutil.rmtree(left, ignore_errors=True)


def _sync(path: Path) -> None:
    """Wait until a file, or the list of names in a folder, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
