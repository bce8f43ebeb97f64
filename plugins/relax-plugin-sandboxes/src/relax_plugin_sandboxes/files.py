# SPDX-License-Identifier: Apache-2.0
"""Access to a box's files from outside, safe against links and special files that a program may have created."""

from __future__ import annotations

import errno
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import PurePosixPath

from relax_core.api import InfrastructureError

NO_FILE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.EEXIST, errno.ENAMETOOLONG)

BLOCK = 4096


def write_file(root: str, path: str, content: bytes) -> None:
    """Write a file below `root`, creating missing folders.

    Raises ValueError if the path leaves `root`, contains a link, or is not a regular file.
    """
    with _parent(root, path, make=True) as (folder, name):
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        file = os.open(name, flags, 0o700, dir_fd=folder)
        with os.fdopen(file, "wb") as opened:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise ValueError(f"sandbox file {path!r} is not a regular file; use another path")
            opened.write(content)


def read_file(root: str, path: str, at_most: int) -> bytes:
    """Return the first `at_most` bytes of a regular file below `root`. Raises the same errors as `write_file`."""
    with _parent(root, path, make=False) as (folder, name):
        file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
        with os.fdopen(file, "rb") as opened:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise ValueError(f"sandbox file {path!r} is not a regular file; use another path")
            return opened.read(at_most)


def size_of(root: str) -> int:
    """Return the bytes on disk of all entries below a folder; each entry counts as at least one block.

    Returns `sys.maxsize`, above any limit, if a folder can't be listed or is too deep for a path.
    """
    found, folders = 0, [root]
    while folders:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    with suppress(FileNotFoundError):
                        found += max(entry.stat(follow_symlinks=False).st_blocks << 9, BLOCK)
                        if entry.is_dir(follow_symlinks=False):
                            folders.append(entry.path)
        except (FileNotFoundError, NotADirectoryError):
            continue  # the folder was removed meanwhile
        except OSError:
            return sys.maxsize
    return found


@contextmanager
def _parent(root: str, path: str, make: bool) -> Iterator[tuple[int, str]]:
    """Open the folder of a file, one part of the path at a time, because `O_NOFOLLOW` applies to the last part only."""
    parts = PurePosixPath(path).parts
    if not parts or ".." in parts or parts[0] == "/" or "\0" in path:
        raise ValueError(f"sandbox file {path!r}: give a path relative to the box's working folder, without `..`")
    folder = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in parts[:-1]:
            if make:
                with suppress(FileExistsError):
                    os.mkdir(part, 0o700, dir_fd=folder)
            inner = os.open(part, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
            os.close(folder)
            folder = inner
        yield folder, parts[-1]
    except OSError as error:
        if error.errno in NO_FILE:
            raise ValueError(f"sandbox file {path!r}: {error.strerror}; links are not followed") from error
        raise InfrastructureError(f"sandbox file {path!r}: {error.strerror}") from error
    finally:
        os.close(folder)
