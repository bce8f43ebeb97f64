# SPDX-License-Identifier: Apache-2.0
"""Runs the suites of the kinds on components, in one pytest process. It writes a test file of one class a component.

The kit is named by text only: the core does not import its tests. Results come back through pytest's own XML report.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from relax_core.api.component import Component
from relax_core.api.kinds import KINDS

DEADLINE_S = 600.0
"""For all suites together; each component that blocks is ended by its suite long before."""


class Subject(NamedTuple):
    """A component under test."""

    distribution: str
    kind: str
    component: Component
    qualifier: str

    @property
    def title(self) -> str:
        return f"{self.kind} {self.component.name}"


Result = tuple[Subject, str, str, str]
"""(subject, check, passed | failed | skipped, detail)."""


def run_suites(subjects: Sequence[Subject], files: Sequence[str]) -> Iterator[Result]:
    """One result a test of each component's suite."""
    with_suite = [subject for subject in subjects if _suite_module(subject.kind)]
    for subject in subjects:
        if subject not in with_suite:
            yield subject, "conformance", "skipped", f"there is no suite for {subject.kind} yet"
    if not with_suite:
        return
    if importlib.util.find_spec("pytest") is None:
        yield from ((s, "conformance", "skipped", "pip install 'relax-core[testing]'") for s in with_suite)
        return
    with tempfile.TemporaryDirectory(prefix="relax-check-") as directory:
        yield from _run(with_suite, [str(Path(file).resolve()) for file in files], Path(directory))


def _suite_module(kind: str) -> bool:
    return importlib.util.find_spec(KINDS[kind].suite.partition(":")[0]) is not None


def _run(subjects: Sequence[Subject], files: Sequence[str], directory: Path) -> Iterator[Result]:
    for number, subject in enumerate(subjects):
        (directory / f"test_{number}.py").write_text(_test_file(subject, files))
    report = directory / "report.xml"
    options = ["-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(directory), f"--junitxml={report}"]
    environ = {
        **os.environ,
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    command = [sys.executable, "-m", "pytest", *options, "--continue-on-collection-errors", "."]
    try:
        done = subprocess.run(
            command, cwd=directory, env=environ, capture_output=True, text=True, timeout=DEADLINE_S, check=False
        )
        output = done.stdout + done.stderr
    except subprocess.TimeoutExpired:
        output = f"the suites took more than {DEADLINE_S:.0f} s"
    if not report.exists():
        yield from ((subject, "conformance", "failed", output.strip()[-2000:]) for subject in subjects)
        return
    yield from _results(subjects, report)


def _test_file(subject: Subject, files: Sequence[str]) -> str:
    module, _, suite = KINDS[subject.kind].suite.partition(":")
    name = f"{subject.qualifier}:{subject.component.name}"
    lines = (
        "from relax_core.plugins import Catalogue",
        f"from {module} import {suite}",
        f"class Test({suite}):",
        f"    component = Catalogue.load({tuple(files)!r}).target({subject.kind!r}, {name!r})",
        "    generic = True",
    )
    return "\n".join(lines) + "\n"


def _results(subjects: Sequence[Subject], report: Path) -> Iterator[Result]:
    """A case is `test_3.Test` of one test, or has no class where its file could not be imported."""
    for case in ElementTree.parse(report).iter("testcase"):
        owner, name = case.get("classname", "").partition(".")[0], case.get("name", "")
        number = int((owner or name).removeprefix("test_"))
        yield subjects[number], name.removeprefix("test_") if owner else "conformance", *_verdict(case)


def _verdict(case: ElementTree.Element) -> tuple[str, str]:
    for tag, verdict in (("failure", "failed"), ("error", "failed"), ("skipped", "skipped")):
        if (child := case.find(tag)) is not None:
            message = child.get("message", "")
            return verdict, (child.text or "").strip()[-1500:] if message in ("", "collection failure") else message
    return "passed", ""
