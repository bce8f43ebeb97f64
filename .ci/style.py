# SPDX-License-Identifier: Apache-2.0
"""Measures the style of the code: sizes of files and functions, docstrings, annotations; fails where a bound is passed.

It judges size and form, never taste. The bounds are STYLE's; an exception needs a reason written below.
Run by `.ci/lint`; `python .ci/style.py [FOLDER ...]` measures other folders.
"""

from __future__ import annotations

import ast
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILE_LINES, FUNCTION_LINES, FUNCTION_P90, FUNCTION_MEDIAN = 400, 80, 40, 12
SPDX = "# SPDX-License-Identifier: Apache-2.0"
LARGE_FILES: dict[str, str] = {}
"""Path -> why it may pass the bound of lines."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Module:
    """One file as measured."""

    path: Path
    lines: int
    tree: ast.Module
    licensed: bool

    @classmethod
    def read(cls, path: Path) -> Module:
        text = path.read_text(encoding="utf-8")
        return cls(path, len(text.splitlines()), ast.parse(text), text.startswith(SPDX))

    @property
    def name(self) -> str:
        return str(self.path.relative_to(ROOT)) if self.path.is_relative_to(ROOT) else str(self.path)

    def functions(self) -> list[Function]:
        return [node for node in ast.walk(self.tree) if isinstance(node, Function)]

    def faults(self) -> Iterator[str]:
        if self.lines > FILE_LINES and self.name not in LARGE_FILES:
            yield f"{self.name}: {self.lines} lines, over {FILE_LINES}; it is two things"
        if not self.licensed:
            yield f"{self.name}: the first line is not {SPDX!r}"
        if self.tree.body and not ast.get_docstring(self.tree):
            yield f"{self.name}: no module docstring"
        for function in self.functions():
            where = f"{self.name}:{function.lineno} {function.name}"
            if size(function) > FUNCTION_LINES:
                yield f"{where}: {size(function)} lines, over {FUNCTION_LINES}"
        for function in public(self.tree):
            if missing := unannotated(function):
                yield f"{self.name}:{function.lineno} {function.name}: no annotation of {', '.join(missing)}"


def size(function: Function) -> int:
    return (function.end_lineno or function.lineno) - function.lineno + 1


def public(tree: ast.Module | ast.ClassDef) -> Iterator[Function]:
    """Functions and methods that others may call; not what is nested in a function."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from public(node)
        if isinstance(node, Function) and (not node.name.startswith("_") or node.name == "__init__"):
            yield node


def unannotated(function: Function) -> list[str]:
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    named += [one for one in (arguments.vararg, arguments.kwarg) if one]
    missing = [one.arg for one in named if one.annotation is None and one.arg not in ("self", "cls")]
    return missing + (["the result"] if function.returns is None else [])


def p90(values: Sequence[int]) -> int:
    return sorted(values)[int(0.9 * (len(values) - 1))] if values else 0


def share(flags: Sequence[bool]) -> str:
    return f"{100 * sum(flags) / len(flags):.0f} %" if flags else "-"


def row(name: str, modules: Sequence[Module]) -> str:
    """One line of the table."""
    lines = [module.lines for module in modules]
    functions = [function for module in modules for function in module.functions()]
    sizes = [size(function) for function in functions] or [0]
    documented = share([bool(ast.get_docstring(function)) for function in functions])
    returns = share([function.returns is not None for function in functions])
    files = f"{statistics.median(lines):.0f} / {p90(lines)} / {max(lines)}"
    spread = f"{statistics.median(sizes):.0f} / {p90(sizes)} / {max(sizes)}"
    return f"{name:<42} {len(lines):>5} {sum(lines):>6}  {files:>15}  {spread:>13}  {documented:>9}  {returns:>8}"


def distribution_faults(name: str, modules: Sequence[Module]) -> Iterator[str]:
    """Bounds on the functions of a package together."""
    sizes = [size(function) for module in modules for function in module.functions()]
    if p90(sizes) > FUNCTION_P90:
        yield f"{name}: one function in ten has over {p90(sizes)} lines; the bound is {FUNCTION_P90}"
    if sizes and statistics.median(sizes) > FUNCTION_MEDIAN:
        yield f"{name}: the median function has {statistics.median(sizes):.0f} lines; the bound is {FUNCTION_MEDIAN}"


def packages() -> list[Path]:
    """The layers of the core, the contributed recipes, every plugin's source. Tests and templates are not measured."""
    layers = sorted(path for path in (ROOT / "relax_core").iterdir() if any(path.glob("*.py")))
    return [ROOT / "relax_core", *layers, ROOT / "relax_contrib", *sorted((ROOT / "plugins").glob("*/src"))]


def modules_of(folder: Path) -> list[Module]:
    """All files below; of the core itself only those beside its layers."""
    found = folder.glob("*.py") if folder == ROOT / "relax_core" else folder.rglob("*.py")
    return [Module.read(path) for path in sorted(found)]


def main(folders: Sequence[Path]) -> int:
    measured = {folder: modules_of(folder) for folder in folders}
    header = ("files", "lines", "file med/p90/max", "func med/p90/max", "docstring", "returns")
    print("{:<42} {:>5} {:>6} {:>16} {:>14}  {:>9}  {:>8}".format("", *header))
    faults: list[str] = []
    for folder, modules in measured.items():
        name = str(folder.relative_to(ROOT)) if folder.is_relative_to(ROOT) else str(folder)
        if modules:
            print(row(name, modules))
        faults += [fault for module in modules for fault in module.faults()]
        faults += distribution_faults(name, modules)
    everything = [module for modules in measured.values() for module in modules]
    if everything:
        print(row("all", everything))
    faults += [f"{path}: an exception for a file that is gone" for path in LARGE_FILES if not (ROOT / path).is_file()]
    print(*faults, sep="\n", end="\n" if faults else "")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main([Path(folder).resolve() for folder in sys.argv[1:]] or packages()))
