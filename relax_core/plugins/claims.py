# SPDX-License-Identifier: Apache-2.0
"""What a plugin that was not loaded would have offered: component names read from its source, without running it.

A guess for error messages only; a plugin that builds its components in a loop can't be read this way.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path

from relax_core.plugins.record import Record


def claims(record: Record, hook: str, name: str) -> bool:
    """Whether the plugin's source offers a component of this name from this hook."""
    source = _source(record)
    return source is not None and (hook, name) in set(_offers(source))


def _source(record: Record) -> ast.Module | None:
    spec = find_module(record.module)
    if spec is None or not spec.origin or not spec.origin.endswith(".py"):
        return None
    try:
        return ast.parse(Path(spec.origin).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None


def find_module(module: str) -> ModuleSpec | None:
    """Find a module part by part: `importlib.util.find_spec` would import its parents."""
    path: list[str] | None = None
    spec: ModuleSpec | None = None
    parts = module.split(".")
    for end in range(1, len(parts) + 1):
        spec = _ask_finders(".".join(parts[:end]), path)
        if spec is None:
            return None
        path = list(spec.submodule_search_locations or ())
    return spec


def _ask_finders(name: str, path: list[str] | None) -> ModuleSpec | None:
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        if find and (spec := find(name, path, None)):
            return spec if isinstance(spec, ModuleSpec) else None
    return None


def _offers(source: ast.Module) -> Iterator[tuple[str, str]]:
    """(hook, name) of every call inside a function whose first argument, or `name`, is a literal string."""
    for function in (node for node in ast.walk(source) if isinstance(node, ast.FunctionDef)):
        for call in (node for node in ast.walk(function) if isinstance(node, ast.Call)):
            for value in (*call.args[:1], *(k.value for k in call.keywords if k.arg == "name")):
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    yield function.name, value.value
