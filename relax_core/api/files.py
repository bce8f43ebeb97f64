# SPDX-License-Identifier: Apache-2.0
"""Python files of authors as modules, and functions in them that an option names."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from relax_core.api.errors import ConfigError


def module_name(file: Path) -> str:
    """Return a name for the module of a file, another one for each absolute path."""
    digest = hashlib.sha256(str(file).encode()).hexdigest()[:8]
    return f"relax_file_{re.sub(r'[^A-Za-z0-9]+', '_', file.stem)}_{digest}"


def import_file(name: str, file: Path) -> ModuleType:
    """Import a file under a name of its own; registered first, because dataclasses and pydantic look their module up."""
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

    An option of the type `str | Path` takes a relative file from the directory of the configuration that names it. Raises
    ConfigError where there is no such function, or its module can't be imported.
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
