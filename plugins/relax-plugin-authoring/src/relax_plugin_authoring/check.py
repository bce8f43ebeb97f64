# SPDX-License-Identifier: Apache-2.0
"""Checks of plugins (`relax plugins check`).

A check examines handshake, import and options, then runs the conformance suite of each component's kind.
Suites run in one pytest process (extra `relax-core[testing]`), with a generated test file for each component. The
module `report_lines` prints each result as soon as its test ends.
"""

from __future__ import annotations

import importlib.util
import json
import os
import select
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple, Self

from relax_core.api import KINDS, Component, RelaxError
from relax_core.api.command import RelaxCommand
from relax_core.launch import Catalogue, PluginState, Record, describe, describe_command, heavy_imports

SILENCE_S = 600.0
"""Seconds without the result of a test, after which the suites are stopped; a suite fails a blocking component earlier."""
SLOW = frozenset({"engine", "trainer"})
"""Kinds whose suites take most of the time: they train and sample with real models."""
CORE = "relax-core"
REPORT_PREFIX = "relax-check: "
"""Start of the lines on which the suites' process prints the results of tests."""


class CheckResult(StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class CheckOutcome:
    """The result of one check."""

    distribution: str
    subject: str
    """Kind and name of a component, such as `reward half`; empty for the plugin as a whole."""
    name: str
    verdict: CheckResult
    detail: str = ""

    @classmethod
    def of(cls, distribution: str, subject: str, name: str, fault: str) -> Self:
        """Return the result of a check that has found `fault`; empty if the check passed."""
        return cls(distribution, subject, name, CheckResult.FAILED if fault else CheckResult.PASSED, fault)

    def as_dict(self) -> dict[str, str]:
        return {**asdict(self), "verdict": str(self.verdict)}


class Subject(NamedTuple):
    """A component to check, with its plugin."""

    distribution: str
    kind: str
    component: Component
    qualifier: str

    @property
    def title(self) -> str:
        return f"{self.kind} {self.component.name}"

    def result(self, name: str, verdict: CheckResult, detail: str = "") -> CheckOutcome:
        """Return a check result for this component."""
        return CheckOutcome(self.distribution, self.title, name, verdict, detail)


def check(
    catalogue: Catalogue,
    records: Sequence[Record],
    files: Sequence[str] = (),
    *,
    slow: bool = True,
    progress: Callable[[str], None] = lambda text: None,
) -> Iterator[CheckOutcome]:
    """Run all checks of these plugins, the cheap checks first; yield each result as soon as it is known.

    `slow`: run also the suites of the kinds in SLOW. `progress` gets a line before each plugin and each suite.
    """
    sound: set[tuple[str, str]] = set()
    for result in examine(catalogue, records, progress):
        yield result
        if result.name == "options" and result.verdict is CheckResult.PASSED:
            sound.add((result.distribution, result.subject))
    opened = [subject for subject in _subjects(records) if (subject.distribution, subject.title) in sound]
    yield from _run_suites(opened, files, slow, progress)


def examine(
    catalogue: Catalogue, records: Sequence[Record], progress: Callable[[str], None] = lambda text: None
) -> Iterator[CheckOutcome]:
    """Run the cheap checks of these plugins: handshake, imports, the options of each component, and each command."""
    for record in records:
        switched_off = record.reason.startswith("switched off")
        sound = CheckResult.PASSED if record.state is PluginState.OK else CheckResult.FAILED
        verdict = CheckResult.SKIPPED if switched_off else sound
        yield CheckOutcome(record.distribution, "", "handshake", verdict, record.frames + record.reason)
        if record.state is PluginState.OK and record.module and not record.file:
            progress(f"{record.distribution}: import")
            yield CheckOutcome.of(record.distribution, "", "light_import", heavy_imports(record.module))
    for subject in _subjects(records):
        yield _opens(catalogue, subject)
    for record in (record for record in records if record.state is PluginState.OK):
        for command in record.commands:
            fault = _command_fault(catalogue, record, command)
            yield CheckOutcome.of(record.distribution, f"command {command.name}", "command", fault)


def _command_fault(catalogue: Catalogue, record: Record, command: RelaxCommand) -> str:
    """Return why a command cannot be called as its metadata says; "" if it can."""
    core = {each.name for own in catalogue.records if own.distribution == CORE for each in own.commands}
    if record.distribution != CORE and command.name in core:
        return f"{CORE} has a command {command.name}; rename this one"
    try:
        text = describe_command(command.qualified(record.distribution)).doc.partition("\n")[0]
    except RelaxError as error:
        return getattr(error, "frames", "") + str(error)
    return "" if text == command.help else f"its documentation begins {text!r}, its entry point says {command.help!r}"


def _subjects(records: Sequence[Record]) -> list[Subject]:
    return [Subject(own.distribution, *item, own.name) for own in records for item in own.components]


def _opens(catalogue: Catalogue, subject: Subject) -> CheckOutcome:
    """Check that a component can be imported, meets its kind's contract, and has readable, documented options."""
    try:
        described = describe(catalogue, subject.kind, f"{subject.qualifier}:{subject.component.name}")
    except RelaxError as error:
        return subject.result("target", CheckResult.FAILED, getattr(error, "frames", "") + str(error))
    except Exception as error:
        return subject.result("options", CheckResult.FAILED, f"its options cannot be read: {error}")
    if bare := [option.name for option in described.options if not option.doc]:
        detail = f"undocumented: {', '.join(bare)}; write a string under each field"
        return subject.result("options", CheckResult.FAILED, detail)
    return subject.result("options", CheckResult.PASSED)


def _run_suites(
    subjects: Sequence[Subject], files: Sequence[str], slow: bool, progress: Callable[[str], None]
) -> Iterator[CheckOutcome]:
    """Run the conformance suite of each component; yield one result per test."""
    suited: list[Subject] = []
    for subject in subjects:
        if reason := _no_suite(subject.kind, slow):
            yield subject.result("conformance", CheckResult.SKIPPED, reason)
        else:
            suited.append(subject)
    if not suited:
        return
    paths = tuple(str(Path(file).resolve()) for file in files)
    of_file = {f"test_{number}": subject for number, subject in enumerate(suited)}
    missing, current, running = dict(of_file), "", ""
    output: deque[str] = deque(maxlen=40)
    with tempfile.TemporaryDirectory(prefix="relax-check-") as directory:
        for file, subject in of_file.items():
            Path(directory, f"{file}.py").write_text(_test_file(subject, paths))
        for line in _run_pytest(directory, output):
            file, test = line["file"], line["name"].removeprefix("test_")
            subject = of_file[file]
            missing.pop(file, None)
            if "verdict" in line:
                running = ""
                yield subject.result(test or "conformance", CheckResult(line["verdict"]), line["detail"])
                continue
            running = test
            if file != current:
                current = file
                number = file.removeprefix("test_")
                progress(f"suite {int(number) + 1} of {len(of_file)}: {subject.kind} {subject.component.name}")
    said = "the test process ended early: " + "\n".join(output).strip()[-2000:]
    if running:
        yield of_file[current].result(running, CheckResult.FAILED, said)
    for subject in missing.values():
        yield subject.result("conformance", CheckResult.FAILED, said)


def _no_suite(kind: str, slow: bool) -> str:
    """Return the reason why the suite of a kind does not run, or "" if it runs."""
    missing = [name for name in ("pytest", "hypothesis") if importlib.util.find_spec(name) is None]
    if missing:  # before the suite: its package imports pytest
        return f"{' and '.join(missing)} not installed: pip install 'relax-core[testing]'"
    if not importlib.util.find_spec(KINDS[kind].suite.partition(":")[0]):
        return f"kind {kind} has no suite yet"
    return "" if slow or kind not in SLOW else f"the suite of {kind} is slow; add --slow, or name the plugin"


def _test_file(subject: Subject, files: tuple[str, ...]) -> str:
    module, _, suite = KINDS[subject.kind].suite.partition(":")
    name = f"{subject.qualifier}:{subject.component.name}"
    lines = (
        "from relax_core.launch import Catalogue",
        f"from {module} import {suite}",
        f"class Test({suite}):",
        f"    component = Catalogue.load({files!r}).target({subject.kind!r}, {name!r})",
        "    generic = True",
    )
    return "\n".join(lines) + "\n"


def _run_pytest(directory: str, output: deque[str]) -> Iterator[dict[str, str]]:
    """Run all test files of the directory, without the pytest plugins of this environment.

    Yield the lines of `relax_plugin_authoring.report_lines` as they arrive; append all other lines to `output`.
    """
    plugins = ["-p", "no:cacheprovider", "-p", "relax_plugin_authoring.report_lines"]
    options = ["-q", *plugins, "-c", os.devnull, "--rootdir", directory, "--continue-on-collection-errors"]
    command = [sys.executable, "-m", "pytest", *options, "."]
    path = os.pathsep.join(filter(None, sys.path))
    environ = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": path}
    with subprocess.Popen(
        command, cwd=directory, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        assert process.stdout is not None
        try:
            for text in _lines(process.stdout.fileno()):
                if text.startswith(REPORT_PREFIX):
                    yield json.loads(text.removeprefix(REPORT_PREFIX))
                else:
                    output.append(text)
        except TimeoutError as error:
            output.append(str(error))
        finally:
            process.kill()


def _lines(pipe: int) -> Iterator[str]:
    """Yield the lines of a pipe; raise TimeoutError after SILENCE_S without a byte."""
    rest = b""
    while select.select([pipe], [], [], SILENCE_S)[0]:
        if not (data := os.read(pipe, 65536)):
            yield rest.decode(errors="replace")
            return
        *lines, rest = (rest + data).split(b"\n")
        yield from (line.decode(errors="replace") for line in lines)
    raise TimeoutError(f"no test ended for {SILENCE_S:.0f} s")
