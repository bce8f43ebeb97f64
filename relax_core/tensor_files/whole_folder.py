# SPDX-License-Identifier: Apache-2.0
"""A folder that is written anew: it takes the place of the one before whole or not at all, an exported model above all.

Two renames bring it there, and a process may be killed between them. The next writer, and the next start of the run, then
finish the change: `finish_replacement` tells by the names which of the two folders is whole.
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
    """Yield a folder to write in; at the end it is on disk, in the place of `final`. Raises OSError, which changes nothing."""
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
    """Put a finished folder in the place of `final`. Raises OSError, and then `final` is what it was."""
    before = final.with_name(f".{final.name}.{os.getpid()}.old")
    if final.exists():
        final.rename(before)
    try:
        unfinished.rename(final)
    except OSError:
        with contextlib.suppress(OSError):  # the first error is the one to tell
            before.rename(final)
        raise
    shutil.rmtree(before, ignore_errors=True)


def finish_replacement(final: Path) -> None:
    """Finish what a process that was killed in `new_folder` has begun, and remove what it left behind. Raises OSError.

    The folder before goes aside only once the new one is on disk: where both are there, the new one takes the place.
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
    """Wait until the disk has a file, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
