# SPDX-License-Identifier: Apache-2.0
"""A directory that appears whole or not at all: written beside, flushed to disk, then renamed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from relax_core.api import InfrastructureError


@contextmanager
def new_directory(directory: str) -> Iterator[Path]:
    """Yields where to write; takes the place of `directory`, which is replaced where it exists."""
    final = Path(directory)
    unfinished = final.with_name(f".{final.name}.{os.getpid()}.tmp")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        unfinished.mkdir(parents=True)
        yield unfinished
        _flush(unfinished)
        replace(unfinished, final)
    except OSError as error:
        raise InfrastructureError(
            f"{directory}: can't be written ({error.strerror or error}); free some room"
        ) from error
    except SafetensorError as error:  # what it writes by itself fails with its own type
        raise InfrastructureError(f"{directory}: can't be written ({error}); free some room") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _flush(directory: Path) -> None:
    for path in directory.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


def replace(unfinished: Path, final: Path) -> None:
    """Put a finished directory in the place of `final`."""
    before = final.with_name(f".{final.name}.{os.getpid()}.old")
    if final.exists():
        final.rename(before)
    unfinished.rename(final)
    shutil.rmtree(before, ignore_errors=True)
