# SPDX-License-Identifier: Apache-2.0
"""Descriptions of components (`relax plugins show`) and checks of plugins (`relax plugins check`).

A check examines handshake, import and options, then runs the conformance suite of each component's kind.
Suites run in one pytest process (extra `relax-core[testing]`), with a generated test file for each component. Suites
are named as text, because the core does not import its test kit. Results come back in pytest's XML report.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, is_dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from xml.etree import ElementTree

from relax_core.api.component import KINDS, Component, Configurable
from relax_core.api.errors import RelaxError
from relax_core.registry.catalogue import Catalogue, known_kind
from relax_core.registry.handshake import PluginState, Record
from relax_core.registry.loader import import_target

if TYPE_CHECKING:
    from relax_core.api.options import Options

DEADLINE_S = 600.0
"""Seconds for all suites together; a suite itself fails a blocking component much earlier."""
HEAVY = ("torch", "ray", "pydantic", "transformers", "tensorflow", "jax", "vllm", "sglang")
"""Packages that a plugin's module may not import, because every `relax` command imports the modules of all plugins."""
_IMPORT_S = 120.0


class CheckResult(StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Check:
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

    def result(self, name: str, verdict: CheckResult, detail: str = "") -> Check:
        """Return a check result for this component."""
        return Check(self.distribution, f"{self.kind} {self.component.name}", name, verdict, detail)


def check(catalogue: Catalogue, records: Sequence[Record], files: Sequence[str] = ()) -> Iterator[Check]:
    """Run all checks of these plugins, the cheap checks first."""
    for record in records:
        switched_off = record.reason.startswith("switched off")
        sound = CheckResult.PASSED if record.state is PluginState.OK else CheckResult.FAILED
        verdict = CheckResult.SKIPPED if switched_off else sound
        yield Check(record.distribution, "", "handshake", verdict, record.frames + record.reason)
        if record.state is PluginState.OK and not record.file:
            detail = heavy_imports(record.module)
            verdict = CheckResult.FAILED if detail else CheckResult.PASSED
            yield Check(record.distribution, "", "light_import", verdict, detail)
    opened: list[Subject] = []
    for subject in [Subject(own.distribution, *item, own.name) for own in records for item in own.components]:
        result = _opens(catalogue, subject)
        yield result
        if result.verdict is CheckResult.PASSED:
            opened.append(subject)
    yield from _run_suites(opened, files)


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


def _opens(catalogue: Catalogue, subject: Subject) -> Check:
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


def _run_suites(subjects: Sequence[Subject], files: Sequence[str]) -> Iterator[Check]:
    """Run the conformance suite of each component; yield one result per test."""
    suited = [one for one in subjects if importlib.util.find_spec(KINDS[one.kind].suite.partition(":")[0])]
    for subject in subjects:
        if subject not in suited:
            yield subject.result("conformance", CheckResult.SKIPPED, f"kind {subject.kind} has no suite yet")
    if not suited:
        return
    if importlib.util.find_spec("pytest") is None:
        for subject in suited:
            yield subject.result("conformance", CheckResult.SKIPPED, "pip install 'relax-core[testing]'")
        return
    paths = tuple(str(Path(file).resolve()) for file in files)
    with tempfile.TemporaryDirectory(prefix="relax-check-") as directory:
        for number, subject in enumerate(suited):
            Path(directory, f"test_{number}.py").write_text(_test_file(subject, paths))
        report = Path(directory, "report.xml")
        output = _run_pytest(directory, report)
        if not report.exists():
            for subject in suited:
                yield subject.result("conformance", CheckResult.FAILED, output.strip()[-2000:])
            return
        # A case has the class name `test_3.Test`; the name is empty if the file could not be imported.
        for case in ElementTree.parse(report).iter("testcase"):
            owner, name = case.get("classname", "").partition(".")[0], case.get("name", "")
            subject = suited[int((owner or name).removeprefix("test_"))]
            yield subject.result(name.removeprefix("test_") if owner else "conformance", *_verdict(case))


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


def _run_pytest(directory: str, report: Path) -> str:
    """Run all test files of the directory, without the pytest plugins of this environment; return the output."""
    options = ["-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", directory, f"--junitxml={report}"]
    command = [sys.executable, "-m", "pytest", *options, "--continue-on-collection-errors", "."]
    path = os.pathsep.join(filter(None, sys.path))
    environ = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": path}
    try:
        done = subprocess.run(
            command, cwd=directory, env=environ, capture_output=True, text=True, timeout=DEADLINE_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"the suites took more than {DEADLINE_S:.0f} s"
    return done.stdout + done.stderr


def _verdict(case: ElementTree.Element) -> tuple[CheckResult, str]:
    outcomes = {"failure": CheckResult.FAILED, "error": CheckResult.FAILED, "skipped": CheckResult.SKIPPED}
    for tag, verdict in outcomes.items():
        if (child := case.find(tag)) is not None:
            message = child.get("message", "")
            return verdict, (child.text or "").strip()[-1500:] if message in ("", "collection failure") else message
    return CheckResult.PASSED, ""


def describe(catalogue: Catalogue, kind: str, name: str) -> dict[str, Any]:
    """Import a component and return the data that `relax plugins show` prints."""
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
        "options": options(cls.options_model()),
    }


def capabilities(kind: str, cls: type[Configurable]) -> dict[str, Any]:
    """Return the class attributes that the base class of the kind declares, with their values in `cls`."""
    base: Any = import_target(known_kind(kind).base)
    declared = dict.fromkeys(name for owner in reversed(base.__mro__) for name in _class_attributes(owner))
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
    """Return (kind, qualified name) of every component with this name, of any kind."""
    wanted, _, bare = name.rpartition(":")
    return [
        (kind, f"{record.distribution}:{component.name}")
        for record in catalogue.records
        if wanted in ("", record.distribution, record.name)
        for kind, component in record.components
        if component.name == bare
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
