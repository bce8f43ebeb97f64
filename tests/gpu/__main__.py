# SPDX-License-Identifier: Apache-2.0
"""Run on a machine with GPUs what the other checks leave out, and write one report: `scripts/gpu-check`.

The parts are the tests marked `gpu`, suites that compute on a GPU where there is one, and the benchmarks for GPUs. The
report is `report.json` and `report.md` in the folder of `--out`, written anew after each part. Exit 0: all parts passed;
1: a part failed; 2: torch sees no GPU, or wrong arguments.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.gpu.parts import ENGINES, ROOT, Part, marked_tests, parts
from tests.gpu.report import Result, document, markdown, read_benchmark, read_tests

FACTS_S = 600.0
"""Seconds for the import of torch from a cold disk."""


def facts() -> dict[str, Any]:
    """Return machine and versions, as a process that imports torch sees them."""
    command = [sys.executable, "-m", "tests.gpu.machine"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=FACTS_S, check=True)
    return dict(json.loads(done.stdout))


def run(part: Part, folder: Path) -> Result:
    """Run a part to its end or its deadline, with its output in a log, and read its results."""
    log, results = folder / f"{part.name}.log", folder / part.results
    results.unlink(missing_ok=True)
    environment = {**os.environ, **part.environment}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    began = time.monotonic()
    with log.open("wb") as output:
        child = subprocess.Popen(
            [part.python, *part.arguments], cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=output,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            status = "failed" if child.wait(part.limit_s) else "passed"
        except subprocess.TimeoutExpired:
            status = "timed out"
        finally:  # also after an interrupt
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
    made = Result(part.name, part.kind, shown(part), status, round(time.monotonic() - began, 1), log.name)
    if results.is_file():
        (read_tests if part.kind == "tests" else read_benchmark)(results, made)
    elif status == "passed":
        made.status = "no results"
    return made


def shown(part: Part) -> str:
    return shlex.join(["python" if part.python == sys.executable else part.python, *part.arguments])


def interpreter(given: str) -> tuple[str, str]:
    name, _, python = given.partition("=")
    if name not in ENGINES or not python:
        raise argparse.ArgumentTypeError(f"got {given!r}; write ENGINE=PYTHON with one of {', '.join(ENGINES)}")
    return name, python


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m tests.gpu", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("gpu-check"), help="folder of the report")
    parser.add_argument("--only", nargs="+", metavar="PART", help="parts to run; all where none is named")
    parser.add_argument("--engine", type=interpreter, action="append", default=[], metavar="ENGINE=PYTHON")
    parser.add_argument("--dry-run", action="store_true", help="print the parts and the marked tests, and run nothing")
    options = parser.parse_args(arguments)
    folder = options.out.absolute()
    chosen = parts(folder, dict(options.engine))
    if unknown := sorted({*(options.only or ())} - {part.name for part in chosen}):
        parser.error(f"--only: got {', '.join(unknown)}; the parts are {', '.join(part.name for part in chosen)}")
    chosen = tuple(part for part in chosen if not options.only or part.name in options.only)
    tests = marked_tests()
    if options.dry_run:
        for part in chosen:
            print(f"run {part.name}: {shown(part)}")
        for test in tests:
            print(f"marked gpu: {test.file}::{test.name}{f' needs {test.gpus} GPUs' if test.gpus > 1 else ''}")
        print(f"write {folder / 'report.json'} and {folder / 'report.md'}")
        return 0
    seen = facts()
    if not seen["machine"]["gpus"]:
        machine = seen["machine"]
        build = f"torch {machine['torch']} is built for CUDA {machine['cuda']}" if machine.get("cuda") else (
            machine.get("lacking") or f"torch {machine['torch']} is a build for CPUs"
        )  # fmt: skip
        print(f"torch sees no GPU: {build}, the driver is {machine.get('driver') or 'not found'}", file=sys.stderr)
        return 2
    return check(folder, chosen, seen)


def check(folder: Path, chosen: Sequence[Part], seen: dict[str, Any]) -> int:
    """Run parts and write the report after each, so that an interrupted check leaves one."""
    folder.mkdir(parents=True, exist_ok=True)
    wanting = [test for test in marked_tests() if test.gpus > len(seen["machine"]["gpus"])]
    when, results = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), list[Result]()
    for part in chosen:
        print(f"== {part.name}: {shown(part)}", file=sys.stderr, flush=True)
        results.append(run(part, folder))
        print(f"   {results[-1].status} after {results[-1].seconds:.0f} s", file=sys.stderr, flush=True)
        report = document(when, commit(), seen, results, wanting)
        (folder / "report.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        (folder / "report.md").write_text(markdown(report), encoding="utf-8")
    print(markdown(report))
    return 1 if any(result.status != "passed" for result in results) else 0


def commit() -> str:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


if __name__ == "__main__":
    sys.exit(main())
