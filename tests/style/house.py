# SPDX-License-Identifier: Apache-2.0
"""Print the measures of the house: size, walks, types that hold workers, circles of imports, and the time of `relax --help`.

Run by `tox -e house`; `-- --list` also names what is counted. The command fails if a measure of `.ci/house.toml` is above
its limit.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import grimp

from tests.style.forms import names
from tests.style.walk import ROOT, walks

WORKERS = {"Worker", "Workers"}
"""The contracts of worker processes in `relax_core.api.role`."""


def size(files: Iterable[Path]) -> str:
    texts = [file.read_text(encoding="utf-8") for file in files]
    return f"{len(texts)} files, {sum(len(text.splitlines()) for text in texts):,} lines"


def worker_types(files: Iterable[Path]) -> Iterator[str]:
    """Yield the classes with `Worker` or `Workers` in an annotation of a field, an attribute or a method."""
    for file in files:
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                parts = list(ast.walk(node))
                annotated = [part.annotation for part in parts if isinstance(part, ast.arg | ast.AnnAssign)]
                annotated += [
                    part.returns for part in parts if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)
                ]
                if names(*annotated) & WORKERS:
                    yield node.name


def circles(packages: Iterable[str]) -> list[list[str]]:
    """Return the groups of modules that import each other, directly or through others, also inside functions.

    The imports of a package's own `__init__`, which offers names of all its modules, are left out.
    """
    found: set[frozenset[str]] = set()
    for package in packages:
        graph = grimp.build_graph(package, cache_dir=None)
        for offered in graph.find_modules_directly_imported_by(package):
            graph.remove_import(importer=package, imported=offered)
        for module in graph.modules:
            around = graph.find_upstream_modules(module) & graph.find_downstream_modules(module)
            found |= {frozenset(around | {module})} if around else set()
    return sorted(map(sorted, found))


def style_module() -> Any:
    """Import `.ci/style.py`, which is no part of a package."""
    spec = importlib.util.spec_from_file_location("style", ROOT / ".ci" / "style.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules["style"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def help_ms() -> int:
    """Return the milliseconds that the fastest of five calls of `relax --help` takes."""
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        subprocess.run([sys.executable, "-m", "relax_core", "--help"], check=True, capture_output=True)
        seconds.append(time.perf_counter() - began)
    return round(min(seconds) * 1e3)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", action="store_true", help="also name the types, the modules and the functions")
    options = parser.parse_args()

    def show(what: str, count: object, listed: Iterable[str] = ()) -> None:
        print(f"{what:<52} {count}", *(f"    {name}" for name in listed if options.list), sep="\n")

    paths = walks()  # first, because the runs print
    packages = sorted(path for path in ROOT.glob("plugins/*/src/*") if (path / "__init__.py").exists())
    core = sorted(file for file in (ROOT / "relax_core").rglob("*.py") if "testing" not in file.parts)
    workers = list(worker_types(file for file in core if "api" not in file.parts))
    rings = circles(["relax_core", "relax_contrib", *(package.name for package in packages)])
    show("the core without testing", size(core))
    show("the plugins", size(file for package in packages for file in package.rglob("*.py")))
    show("test code", size([*(ROOT / "tests").rglob("*.py"), *ROOT.glob("plugins/*/tests/**/*.py")]))
    show("types that hold or start workers", len(workers), workers)
    show("circles of imports", len(rings), (", ".join(ring) for ring in rings))
    for name, walk in paths.items():
        counts = f"{len(walk.functions)} functions, {len(walk.files)} files, {walk.climbs} climbs"
        show(f"the walk of {name}", counts, walk.functions)
    sample = paths["a sample, inline, the core"]
    measured = {
        "sample_functions": len(sample.functions),
        "sample_files": len(sample.files),
        "sample_climbs": sample.climbs,
        "worker_types": len(workers),
        "help_ms": help_ms(),
    }
    show("relax --help", f"{measured['help_ms']} ms")
    faults = list(style_module().above_limit(measured))
    print(*faults, sep="\n", end="\n" if faults else "")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
