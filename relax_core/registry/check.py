# SPDX-License-Identifier: Apache-2.0
"""Descriptions of components and commands (`relax plugins show`) and checks of plugins (`relax plugins check`).

A check examines handshake, import and options, then runs the conformance suite of each component's kind.
Suites run in one pytest process (extra `relax-core[testing]`), with a generated test file for each component. Suites
are named as text, because the core does not import its test kit. `relax_core.testing.report_lines` prints each result
as soon as its test ends.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import select
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, is_dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from relax_core.api.component import KINDS, Component, Configurable
from relax_core.api.errors import RelaxError
from relax_core.registry.catalogue import Catalogue, known_kind
from relax_core.registry.commands import Commands, OfferedCommand
from relax_core.registry.handshake import CORE, PluginState, Record
from relax_core.registry.loader import import_target

if TYPE_CHECKING:
    from relax_core.api.options import Options

SILENCE_S = 600.0
"""Seconds without the result of a test, after which the suites are stopped; a suite fails a blocking component earlier."""
REPORT_PREFIX = "relax-check: "
"""Start of the lines on which the suites' process prints the results of tests."""
SLOW = frozenset({"engine", "trainer"})
"""Kinds whose suites take most of the time: they train and sample with real models."""
HEAVY = ("torch", "ray", "pydantic", "transformers", "tensorflow", "jax", "vllm", "sglang")
"""Packages that a plugin's module may not import, because every `relax` command imports the modules of all plugins."""
_IMPORT_S = 120.0


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

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "verdict": str(self.verdict)}


class Subject(NamedTuple):
    """A component to check, with its plugin."""

    distribution: str
    kind: str
    component: Component
    qualifier: str

    def result(self, name: str, verdict: CheckResult, detail: str = "") -> CheckOutcome:
        """Return a check result for this component."""
        return CheckOutcome(self.distribution, f"{self.kind} {self.component.name}", name, verdict, detail)


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
    sound: set[str] = set()
    for result in examine(catalogue, records, progress):
        yield result
        if result.name == "options" and result.verdict is CheckResult.PASSED:
            sound.add(f"{result.distribution} {result.subject}")
    opened = [one for one in _subjects(records) if f"{one.distribution} {one.kind} {one.component.name}" in sound]
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
            detail = heavy_imports(record.module)
            verdict = CheckResult.FAILED if detail else CheckResult.PASSED
            yield CheckOutcome(record.distribution, "", "light_import", verdict, detail)
    for subject in _subjects(records):
        yield _opens(catalogue, subject)
    for record in records:
        for command in record.commands:
            detail = _command_fault(OfferedCommand(command, record))
            verdict = CheckResult.FAILED if detail else CheckResult.PASSED
            yield CheckOutcome(record.distribution, f"command {command.name}", "command", verdict, detail)


def _command_fault(offered: OfferedCommand) -> str:
    """Return why a command cannot be called as its metadata says; "" if it can."""
    command, record = offered
    if record.distribution != CORE and command.name in Commands().core:
        return f"{CORE} has a command {command.name}; rename this one"
    try:
        text = (offered.parser(command.name).help or "").partition("\n")[0]
    except RelaxError as error:
        return getattr(error, "frames", "") + str(error)
    return "" if text == command.help else f"its documentation begins {text!r}, its entry point says {command.help!r}"


def _subjects(records: Sequence[Record]) -> list[Subject]:
    return [Subject(own.distribution, *item, own.name) for own in records for item in own.components]


def heavy_imports(module: str) -> str:
    """Import a plugin's module alone in a fresh interpreter; return the problem, or "" if the import is light."""
    code = f"import sys; sys.path[:] = {sys.path!r}; import {module}; print(*sorted({set(HEAVY)!r} & set(sys.modules)))"
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=_IMPORT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"importing {module} takes more than {_IMPORT_S:.0f} s; import heavy libraries inside functions"
    if done.returncode:
        return done.stderr.strip()
    heavy = ", ".join(done.stdout.split())
    return f"{module} imports {heavy}; name targets as strings, and import it in their modules" if heavy else ""


def _opens(catalogue: Catalogue, subject: Subject) -> CheckOutcome:
    """Check that a component can be imported, meets its kind's contract, and has readable, documented options."""
    try:
        described = describe(catalogue, subject.kind, f"{subject.qualifier}:{subject.component.name}")
    except RelaxError as error:
        return subject.result("target", CheckResult.FAILED, getattr(error, "frames", "") + str(error))
    except Exception as error:
        return subject.result("options", CheckResult.FAILED, f"its options cannot be read: {error}")
    if bare := [option["name"] for option in described["options"] if not option["doc"]]:
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
        "from relax_core.registry import Catalogue",
        f"from {module} import {suite}",
        f"class Test({suite}):",
        f"    component = Catalogue.load({files!r}).target({subject.kind!r}, {name!r})",
        "    generic = True",
    )
    return "\n".join(lines) + "\n"


def _run_pytest(directory: str, output: deque[str]) -> Iterator[dict[str, str]]:
    """Run all test files of the directory, without the pytest plugins of this environment.

    Yield the lines of `relax_core.testing.report_lines` as they arrive; append all other lines to `output`.
    """
    plugins = ["-p", "no:cacheprovider", "-p", "relax_core.testing.report_lines"]
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


def describe(catalogue: Catalogue, kind: str, name: str) -> dict[str, Any]:
    """Import a component or command and return the data that `relax plugins show` prints."""
    if kind == "command":
        offered = Commands().find(name)
        command, record = offered
        return {
            "kind": "command", **asdict(command), "distribution": record.distribution, "version": record.version,
            "doc": offered.parser(command.name).help or "",
        }  # fmt: skip
    found, cls = catalogue.find(kind, name), catalogue.target(kind, name)
    return {
        "kind": kind,
        "name": found.component.name,
        "help": found.component.help,
        "experimental": found.component.experimental,
        "distribution": found.distribution,
        "version": found.version,
        "target": found.component.target,
        "source": _source(cls),
        "doc": inspect.getdoc(cls) or "",
        "capabilities": capabilities(kind, cls),
        "options": options(cls.options_model()) if KINDS[kind].base else [],
    }


def capabilities(kind: str, cls: type[Configurable]) -> dict[str, Any]:
    """Return the class attributes that the base class of the kind declares, with their values in `cls`."""
    if not known_kind(kind).base:
        return {}
    base: Any = import_target(known_kind(kind).base)
    owners = [owner for owner in reversed(base.__mro__) if owner.__module__.startswith("relax_core.")]
    declared = dict.fromkeys(name for owner in owners for name in _class_attributes(owner))
    return {name: plain(getattr(cls, name)) for name in declared if name not in _class_attributes(Configurable)}


def options(model: type[Options]) -> list[dict[str, Any]]:
    """Return name, type, default and documentation of each option."""
    return [
        {
            "name": name,
            "type": _type_name(field.annotation),
            "required": field.is_required(),
            "default": None if field.is_required() else plain(field.get_default(call_default_factory=True)),
            "doc": field.description or "",
        }
        for name, field in model.model_fields.items()
    ]


def components_named(catalogue: Catalogue, name: str) -> list[tuple[str, str]]:
    """Return (kind, qualified name) of every component and command with this name."""
    wanted, _, bare = name.rpartition(":")
    return [
        (kind, qualified)
        for record in catalogue.records
        if wanted in ("", record.distribution, record.name)
        for kind, offered, qualified in (
            *((kind, each.name, f"{record.distribution}:{each.name}") for kind, each in record.components),
            *(("command", each.name, each.qualified(record.distribution)) for each in record.commands),
        )
        if offered == bare
    ]


def records_named(catalogue: Catalogue, name: str) -> list[Record]:
    """Return the records whose distribution, entry point, file name or location is `name`."""
    return [record for record in catalogue.records if name in (record.distribution, record.name, record.location)]


def plain(value: object) -> Any:
    """Convert a value to data that JSON can hold; objects without a JSON type become text."""
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, Set):
        return sorted((plain(item) for item in value), key=str)
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value if value is None or isinstance(value, (bool, int, float)) else str(value)


def _class_attributes(owner: type) -> list[str]:
    annotations = vars(owner).get("__annotations__", {})
    return [name for name, annotation in annotations.items() if str(annotation).startswith("ClassVar")]


def _source(cls: type) -> str:
    try:
        return f"{inspect.getsourcefile(cls)}:{inspect.getsourcelines(cls)[1]}"
    except (OSError, TypeError):
        return ""  # compiled or built at run time


def _type_name(annotation: Any) -> str:
    return annotation.__name__ if isinstance(annotation, type) else str(annotation).replace("typing.", "")
