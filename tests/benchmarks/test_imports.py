# SPDX-License-Identifier: Apache-2.0
"""The names that benchmarks import exist, though nothing runs most benchmarks between two measurements.

Modules are read and not imported, because some need an engine's interpreter.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = (ROOT, *ROOT.glob("plugins/*/src"))
OURS = ("relax_core", "relax_contrib", "relax_plugin_", "tests.")
BENCHMARKS = sorted(Path(__file__).parent.glob("*.py"))


def file_of(module: str) -> Path | None:
    path = Path(*module.split("."))
    found = (source / name for source in SOURCES for name in (path.with_suffix(".py"), path / "__init__.py"))
    return next((file for file in found if file.is_file()), None)


@cache
def names_of(file: Path) -> frozenset[str]:
    """Return the names that a module defines or imports outside of functions and classes."""
    return frozenset(names_in(ast.parse(file.read_text(encoding="utf-8")).body))


def names_in(body: list[ast.stmt]) -> Iterator[str]:
    for statement in body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield statement.name
        elif isinstance(statement, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name.partition(".")[0] for alias in statement.names)
        elif isinstance(statement, ast.If | ast.Try | ast.With):
            parts = (getattr(statement, part, []) for part in ("body", "orelse", "finalbody"))
            yield from (name for part in parts for name in names_in(part))
            yield from (name for handler in getattr(statement, "handlers", []) for name in names_in(handler.body))
        else:
            names = (node for node in ast.walk(statement) if isinstance(node, ast.Name))
            yield from (name.id for name in names if isinstance(name.ctx, ast.Store))


@pytest.mark.parametrize("benchmark", BENCHMARKS, ids=lambda file: file.stem)
def test_the_imported_names_exist(benchmark: Path) -> None:
    for node in ast.walk(ast.parse(benchmark.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith(OURS):
            continue
        file = file_of(node.module or "")
        assert file is not None, f"{benchmark.name} imports {node.module}, which does not exist"
        for alias in node.names:
            known = alias.name in names_of(file) or file_of(f"{node.module}.{alias.name}") is not None
            assert known or "__getattr__" in names_of(file), f"{benchmark.name}: {node.module} has no {alias.name}"
