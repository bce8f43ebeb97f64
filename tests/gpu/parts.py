# SPDX-License-Identifier: Apache-2.0
"""The parts of the GPU check: tests marked `gpu`, suites that compute on a GPU where there is one, and benchmarks.

This module imports the standard library only, so that `scripts/gpu-check --dry-run` works before anything is installed.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tests.benchmarks.__main__ import ON_GPU

ROOT = Path(__file__).resolve().parents[2]
SUITES: Mapping[str, tuple[str, ...]] = {
    "torch": ("plugins/relax-plugin-torch/tests/test_conformance.py",),
    "transformers": ("plugins/relax-plugin-transformers/tests/test_conformance.py",),
    "megatron": (
        "plugins/relax-plugin-megatron/tests/test_conformance.py", "plugins/relax-plugin-megatron/tests/test_layouts.py",
    ),
}  # fmt: skip
"""Test files whose trainers and engines choose a GPU by themselves; several ranks need as many GPUs, else they use CPUs."""
ENGINES = ("vllm", "sglang")
"""Engines with an interpreter of their own, whose conformance suites run in it."""
TESTS_S, BENCHMARK_S = 1800.0, 3600.0
"""Seconds after which a part is ended."""


@dataclass(frozen=True, slots=True)
class MarkedTest:
    """A test marked `gpu`, and the number of GPUs that it needs."""

    file: str
    name: str
    gpus: int


@dataclass(frozen=True, slots=True)
class Part:
    """One command of the check, without its interpreter; it writes its results into the folder of the report."""

    name: str
    kind: Literal["tests", "benchmark"]
    arguments: tuple[str, ...]
    limit_s: float
    python: str = sys.executable
    results: str = ""
    """Name of the file with the results: a JUnit file of tests, a JSON document of a benchmark."""
    environment: Mapping[str, str] = field(default_factory=dict)


def marked_tests(root: Path = ROOT) -> tuple[MarkedTest, ...]:
    """Return the tests marked `gpu`, by file and name; a parametrized test is one of them."""
    files = sorted({*root.glob("tests/**/test_*.py"), *root.glob("plugins/*/tests/**/test_*.py")})
    return tuple(test for file in files for test in _marked(file, str(file.relative_to(root))))


def _marked(file: Path, name: str) -> Iterator[MarkedTest]:
    text = file.read_text(encoding="utf-8")
    if "mark.gpu" not in text:
        return
    tree, whole = ast.parse(text), 0
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
            whole = _gpus(node.value.elts if isinstance(node.value, ast.List) else [node.value])
    yield from _marked_in(tree, name, whole)


def _marked_in(tree: ast.Module | ast.ClassDef, file: str, gpus: int) -> Iterator[MarkedTest]:
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            yield from _marked_in(node, file, _gpus(node.decorator_list) or gpus)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            needed = _gpus(node.decorator_list) or gpus
            if needed and node.name.startswith("test_"):
                yield MarkedTest(file, node.name, needed)


def _gpus(marks: list[ast.expr]) -> int:
    """Return the GPUs that `pytest.mark.gpu` asks for among these marks; 0 without it."""
    for mark in marks:
        name, arguments = (mark.func, mark.args) if isinstance(mark, ast.Call) else (mark, [])
        if ast.unparse(name) == "pytest.mark.gpu":
            return int(ast.literal_eval(arguments[0])) if arguments else 1
    return 0


def parts(folder: Path, engines: Mapping[str, str]) -> tuple[Part, ...]:
    """Return all parts, in the order in which they run. `engines`: interpreters by name of the engine."""
    files = sorted({test.file for test in marked_tests()})
    made = [_tests("marked", folder, "gpu", files)]
    made += [_tests(name, folder, "not gpu and not faults", suite) for name, suite in SUITES.items()]
    for name, python in engines.items():
        made.append(_tests(name, folder, "not gpu and not faults", [f"plugins/relax-plugin-{name}/tests"], python))
    for name, arguments in ON_GPU.items():
        command = ("-m", "tests.benchmarks", name, "--anyway", "--out", str(folder), *arguments)
        made.append(Part(f"bench-{name}", "benchmark", command, BENCHMARK_S, results=f"{name}.json"))
    return tuple(made)


def _tests(
    name: str, folder: Path, marks: str, files: list[str] | tuple[str, ...], python: str = sys.executable
) -> Part:
    results = f"{name}.xml"
    command = ("-m", "pytest", "-n", "0", "-m", marks, "--junitxml", str(folder / results), *files)
    return Part(
        name, "tests", command, TESTS_S, python, results, {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    )
