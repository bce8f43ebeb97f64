# SPDX-License-Identifier: Apache-2.0
"""Small files that a user names: texts, Python files, and functions in a file or module."""

from __future__ import annotations

import errno
import hashlib
import importlib
import importlib.util
import os
import re
import stat
import sys
from collections.abc import Callable
from io import BufferedReader, TextIOWrapper
from pathlib import Path
from types import ModuleType
from typing import Any

from relax_core.api.errors import ConfigError

LARGEST = 64 << 20
"""Most bytes of a small file."""


def read_text(file: str | Path, encoding: str = "utf-8") -> str:
    """Return the text of a small file. Raises OSError."""
    with open_regular(file) as opened:
        if os.fstat(opened.fileno()).st_size > LARGEST:
            raise OSError(errno.EFBIG, f"larger than {LARGEST >> 20} MiB", str(file))
        return TextIOWrapper(opened, encoding).read()


def open_regular(file: str | Path) -> BufferedReader:
    """Open a file for reading. Raises OSError, also for a pipe or device, whose reader could wait for ever."""
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    kind = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(kind):
        os.close(descriptor)
        is_folder = stat.S_ISDIR(kind)
        raise OSError(
            *((errno.EISDIR, "Is a directory") if is_folder else (errno.EINVAL, "not a regular file")), str(file)
        )
    return os.fdopen(descriptor, "rb")


def module_name(file: Path) -> str:
    """Return a module name for a file, unique for each absolute path."""
    digest = hashlib.sha256(str(file).encode()).hexdigest()[:8]
    return f"relax_file_{re.sub(r'[^A-Za-z0-9]+', '_', file.stem)}_{digest}"


def import_file(name: str, file: Path) -> ModuleType:
    """Import a file under this module name.

    The module enters `sys.modules` before it runs, because dataclasses and pydantic look it up there.
    """
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is not a Python module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def load_function(key: str, place: str) -> Callable[..., Any]:
    """Import the function that the option `key` names as `file.py:name` or `module:name`.

    For an option of type `str | Path`, a relative file name is relative to the configuration file. Raises ConfigError
    if the module can't be imported or has no such function.
    """
    where, _, name = place.rpartition(":")
    if not where or not name:
        raise ConfigError(key, place, "name a function as file.py:name or module:name")
    file = Path(where).expanduser().resolve() if where.endswith(".py") else None
    if file is not None and not file.is_file():
        raise ConfigError(key, place, f"there is no file {file}")
    try:
        module = importlib.import_module(where) if file is None else import_file(f"{module_name(file)}_functions", file)
    except Exception as error:
        raise ConfigError(key, place, f"it can't be imported: {type(error).__name__}: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(key, place, f"{where} has no function {name!r}")
    return function  # type: ignore[no-any-return]
