# SPDX-License-Identifier: Apache-2.0
"""Runs the suites of many components in a pytest process of their own and says what failed.

A module of this folder names its components' files in `suite_files`: path -> text. All files run in one pytest process,
however many tests read its results: components cost little, the start of pytest and of the suites' fork servers costs seconds.
These tests run in one process, so that the suites run once.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

Outcomes = dict[str, str]
"""test -> passed, skipped or its failure's message."""
DEADLINE_S = 600
"""Against hanging for ever only: a component that blocks is ended by its suite within a second."""


@pytest.fixture(scope="session")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Outcomes]:
    """Return what the tests of a file say, given its name without `.py`."""
    folder = tmp_path_factory.mktemp("suites")
    for module in dict.fromkeys(getattr(item, "module", None) for item in request.session.items):
        if hasattr(module, "suite_files"):
            for path, text in module.suite_files().items():
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                (folder / path).write_text(text)

    return _run(folder).__getitem__


@pytest.fixture(scope="session")
def failures(outcomes: Callable[[str], Outcomes]) -> Callable[[str], Outcomes]:
    """Return the failed tests of a file with their messages."""

    def of_file(path: str) -> Outcomes:
        return {name: told for name, told in outcomes(path).items() if told not in ("passed", "skipped")}

    return of_file


def _run(folder: Path) -> dict[str, Outcomes]:
    """Run pytest on a folder; return the outcomes by file."""
    environ = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    options = [
        "-q",
        "-p",
        "no:cacheprovider",
        "-c",
        os.devnull,
        f"--rootdir={folder}",
        "--continue-on-collection-errors",
    ]
    command = [sys.executable, "-m", "pytest", *options, "--junitxml=report.xml", "."]
    done = subprocess.run(
        command, cwd=folder, env=environ, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    report = folder / "report.xml"
    assert report.exists(), done.stdout + done.stderr
    results: dict[str, Outcomes] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        # A case is `test_it.TestMine` of one test, or has no class where its file could not be imported.
        file, name = case.get("classname", "").partition(".")[0], case.get("name", "")
        results.setdefault(file or name, {})[name] = _outcome(case)
    return results


def _outcome(case: ElementTree.Element) -> str:
    for child in case:
        if child.tag == "skipped":
            return "skipped"
        if child.tag in ("failure", "error"):
            return child.get("message") or child.text or "failed"
    return "passed"
