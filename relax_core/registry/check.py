# SPDX-License-Identifier: Apache-2.0
"""`relax plugins check`: does an installed plugin keep its promises? Handshake, import, options, then the conformance suites.

Suites run through pytest in another process (extra `relax-core[testing]`); this module never imports them.

Runs the suites of the kinds on components, in one pytest process. It writes a test file of one class a component.

The kit is named by text only: the core does not import its tests. Results come back through pytest's own XML report.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

from relax_core.api.component import KINDS, Component
from relax_core.api.errors import RelaxError
from relax_core.registry.catalogue import Catalogue
from relax_core.registry.describe import describe
from relax_core.registry.record import Offered, PluginState, Record

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
        "from relax_core.registry import Catalogue",
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


HEAVY = ("torch", "ray", "pydantic", "transformers", "tensorflow", "jax", "vllm", "sglang")
"""What no plugin's listing may import: every `relax` command lists all plugins."""
_IMPORT_S = 120.0


class CheckResult(StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Check:
    """One thing looked at."""

    distribution: str
    subject: str
    """`reward half`, or empty for the plugin as a whole."""
    name: str
    verdict: CheckResult
    detail: str = ""

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "verdict": str(self.verdict)}


def check(catalogue: Catalogue, records: Sequence[Record], files: Sequence[str] = ()) -> Iterator[Check]:
    """Every check of these plugins, cheap ones first."""
    for record in records:
        yield _handshake(record)
        if record.state is PluginState.OK and not record.file:
            yield _light(record)
    offered = [(record, item) for record in records for item in record.components]
    sound: list[Subject] = []
    for record, item in offered:
        opened = _opens(catalogue, record, item)
        yield opened
        if opened.verdict is CheckResult.PASSED:
            sound.append(Subject(record.distribution, *item, record.name))
    for subject, name, verdict, detail in run_suites(sound, files):
        yield Check(subject.distribution, subject.title, name, CheckResult(verdict), detail)


def _handshake(record: Record) -> Check:
    verdict = {
        PluginState.OK: CheckResult.PASSED,
        PluginState.BROKEN: CheckResult.FAILED,
        PluginState.SKIPPED: CheckResult.FAILED,
    }[record.state]
    if record.reason.startswith("switched off"):
        verdict = CheckResult.SKIPPED
    return Check(record.distribution, "", "handshake", verdict, record.frames + record.reason)


def _light(record: Record) -> Check:
    detail = heavy_imports(record.module)
    return Check(record.distribution, "", "light_import", CheckResult.FAILED if detail else CheckResult.PASSED, detail)


def heavy_imports(module: str) -> str:
    """Import a plugin's module alone in a fresh interpreter: what is wrong with that, or empty."""
    code = f"import sys; sys.path[:] = {sys.path!r}; import {module}; print(*sorted({set(HEAVY)!r} & set(sys.modules)))"
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=_IMPORT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"importing {module} takes more than {_IMPORT_S:.0f} s; import heavy libraries where they are used"
    if done.returncode:
        return done.stderr.strip()
    heavy = ", ".join(done.stdout.split())
    return f"{module} imports {heavy}; name targets as strings and import there" if heavy else ""


def _opens(catalogue: Catalogue, record: Record, item: Offered) -> Check:
    """The component is imported, of its kind, and its options can be told."""
    title = f"{item.kind} {item.component.name}"
    try:
        described = describe(catalogue, item.kind, f"{record.name}:{item.component.name}")
    except RelaxError as error:
        return Check(
            record.distribution, title, "target", CheckResult.FAILED, getattr(error, "frames", "") + str(error)
        )
    except Exception as error:
        return Check(record.distribution, title, "options", CheckResult.FAILED, f"its options can't be read: {error}")
    if bare := [option["name"] for option in described["options"] if not option["doc"]]:
        detail = f"undocumented: {', '.join(bare)}; write a string under each field"
        return Check(record.distribution, title, "options", CheckResult.FAILED, detail)
    return Check(record.distribution, title, "options", CheckResult.PASSED)
