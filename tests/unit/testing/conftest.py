# SPDX-License-Identifier: Apache-2.0
"""Runs a suite on a component in a pytest of its own and says what failed."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

Outcomes = dict[str, str]
"""test -> passed, skipped or its failure's message."""


@pytest.fixture
def outcomes(tmp_path: Path) -> Callable[..., Outcomes]:
    def run(code: str) -> Outcomes:
        (tmp_path / "test_it.py").write_text(textwrap.dedent(code))
        report = tmp_path / "report.xml"
        environ = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        options = ["-q", "-p", "no:cacheprovider", "-c", os.devnull, f"--rootdir={tmp_path}", f"--junitxml={report}"]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *options, "test_it.py"],
            cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=600, check=False,
        )  # fmt: skip
        assert report.exists(), done.stdout + done.stderr
        cases = ElementTree.parse(report).iter("testcase")
        return {case.get("name", ""): _outcome(case) for case in cases}

    return run


def _outcome(case: ElementTree.Element) -> str:
    for child in case:
        if child.tag == "skipped":
            return "skipped"
        if child.tag in ("failure", "error"):
            return child.get("message") or child.text or "failed"
    return "passed"


def _failures(outcomes: Outcomes) -> Outcomes:
    return {name: told for name, told in outcomes.items() if told not in ("passed", "skipped")}


@pytest.fixture
def failures() -> Callable[[Outcomes], Outcomes]:
    return _failures
