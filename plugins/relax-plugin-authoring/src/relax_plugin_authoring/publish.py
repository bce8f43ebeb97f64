# SPDX-License-Identifier: Apache-2.0
"""The checks before the upload of a plugin project to a package index (`relax plugins publish`).

The project is built as for an upload, and the metadata, files and components of the built wheel are checked. So the
checks see the same data as the index and the users, with every build backend. Nothing is uploaded.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from configparser import ConfigParser
from dataclasses import asdict, dataclass
from pathlib import Path
from shutil import copy2

from packaging.metadata import InvalidMetadata, Metadata, RawMetadata, parse_email
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from relax_core.api import ConfigError
from relax_core.api.command import COMMANDS
from relax_core.launch import api_range, core_range

PLUGINS = "relax.plugins"
BUILD_S = 600.0
"""Seconds for the build, which may install the build backend first."""
_IMPORT_S = 300.0
_PREFIX = "relax-plugin-"
_EXAMINE = """
import json, sys
from relax_core.launch import Catalogue, selected
from relax_plugin_authoring.check import examine
catalogue = Catalogue.load()
found = [item.as_dict() for item in examine(catalogue, selected(catalogue, sys.argv[1]))]
print("\\n" + json.dumps(found))
"""


@dataclass(frozen=True, slots=True)
class PublishFinding:
    """A problem of the project."""

    field: str
    """The key of pyproject.toml, or the part of the project, to change."""
    problem: str
    fix: str
    blocks: bool = True
    """True if the project must be corrected before an upload; false for advice."""

    def __str__(self) -> str:
        return f"{'error ' if self.blocks else 'advice'}  {self.field}: {self.problem}; {self.fix}"


@dataclass(frozen=True, slots=True)
class Publication:
    """The result of the checks."""

    findings: tuple[PublishFinding, ...]
    files: tuple[Path, ...]
    """The built sdist and wheel in the folder `dist` of the project; empty in a dry run and if a finding blocks."""

    @property
    def ready(self) -> bool:
        """True if no finding blocks the upload."""
        return not any(finding.blocks for finding in self.findings)

    def as_dict(self) -> dict[str, object]:
        return {
            "schema": "relax.publish/1",
            "ready": self.ready,
            "findings": [asdict(finding) for finding in self.findings],
            "files": [str(file) for file in self.files],
        }


def publish(project: Path, *, dry_run: bool, isolated: bool = True) -> Publication:
    """Build and check a project; without `dry_run`, keep the built files in its folder `dist` if nothing blocks.

    `isolated`: build with a build backend that is installed for this build, else with the packages of this environment.
    Raises ConfigError if the folder is not a project or the package `build` is missing.
    """
    if not (project / "pyproject.toml").is_file():
        raise ConfigError("PROJECT", str(project), "name a folder with a pyproject.toml, such as one of `relax new`")
    if importlib.util.find_spec("build") is None:
        raise ConfigError("relax plugins publish", "an environment without the package build", "pip install build")
    with tempfile.TemporaryDirectory(prefix="relax-publish-") as scratch:
        built, output = Path(scratch, "dist"), ""
        try:
            output = _build(project, built, isolated)
        except subprocess.TimeoutExpired:
            output = f"the build took more than {BUILD_S:.0f} s"
        files = sorted(built.glob("*.tar.gz")) + sorted(built.glob("*.whl"))
        if output or len(files) != 2:
            fix = "mend the project until `python -m build` succeeds"
            return Publication(
                (PublishFinding("build", output or f"it made {len(files)} files, not an sdist and a wheel", fix),), ()
            )
        found = tuple(check_wheel(files[1], Path(scratch, "unpacked")))
        if dry_run or any(finding.blocks for finding in found):
            return Publication(found, ())
        kept = project / "dist"
        kept.mkdir(exist_ok=True)
        return Publication(found, tuple(Path(copy2(file, kept)) for file in files))


def _build(project: Path, out: Path, isolated: bool) -> str:
    """Build the sdist, and from the sdist the wheel; return the end of the output if the build fails, else ""."""
    command = [sys.executable, "-m", "build", *(() if isolated else ("--no-isolation",)), "--outdir", str(out)]
    done = subprocess.run(
        [*command, str(project)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, timeout=BUILD_S, check=False,
    )  # fmt: skip
    return done.stdout.strip()[-2000:] if done.returncode else ""


def check_wheel(wheel: Path, unpacked: Path) -> Iterator[PublishFinding]:
    """Yield the problems of a built wheel; the wheel is unpacked into the new folder `unpacked`."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(unpacked)
    (info,) = unpacked.glob("*.dist-info")
    data = (info / "METADATA").read_bytes()
    raw, unknown = parse_email(data)
    entries = ConfigParser(delimiters=("=",))
    entries.optionxform = str  # type: ignore[assignment, method-assign]  # names of entry points keep their case
    entries.read(info / "entry_points.txt", encoding="utf-8")
    points = {
        name: value for group in (PLUGINS, COMMANDS) if group in entries for name, value in entries[group].items()
    }
    yield from invalid_fields(data, unknown)
    yield from check_metadata(raw, points)
    yield from _check_packages(sorted(path.name for path in unpacked.iterdir() if path.is_dir() and path != info))
    if points and api_range(raw.get("requires_dist", ())):
        yield from _check_components(raw.get("name", ""), unpacked)


def invalid_fields(data: bytes, unknown: Mapping[str, Sequence[str]]) -> Iterator[PublishFinding]:
    """Yield the fields that the standard of package metadata does not allow."""
    for field in unknown:
        yield PublishFinding(
            field.lower(), "the metadata has a field that cannot be read", "remove it from pyproject.toml"
        )
    try:
        Metadata.from_email(data)
    except ExceptionGroup as group:
        for error in group.exceptions:
            if not isinstance(error, InvalidMetadata) or error.field not in unknown:
                field = error.field if isinstance(error, InvalidMetadata) else "metadata"
                yield PublishFinding(field, str(error), "correct it in pyproject.toml")


def check_metadata(raw: RawMetadata, points: Mapping[str, str]) -> Iterator[PublishFinding]:
    """Yield the problems of a plugin's metadata; `points`: its entry points of the groups that Relax reads."""
    name = raw.get("name", "")
    canonical = canonicalize_name(name)
    if not canonical.startswith(_PREFIX):
        fix = f'name the project "{_PREFIX}{canonical.removeprefix("relax-")}", so that users find it'
        yield PublishFinding("name", f"{name!r} does not begin with {_PREFIX}", fix, blocks=False)
    yield from _check_version(raw.get("version", ""))
    if not raw.get("summary", "").strip():
        yield PublishFinding("description", "missing", 'add description = "One sentence on what the plugin offers"')
    if not raw.get("description", "").strip():
        yield PublishFinding("readme", "missing or empty", 'write README.md and add readme = "README.md"')
    classifiers = raw.get("classifiers", [])
    licensed = any(name.startswith("License ::") for name in classifiers)
    if not (raw.get("license_expression") or raw.get("license") or licensed):
        yield PublishFinding("license", "missing", 'add license = "Apache-2.0", or another SPDX expression')
    if private := [name for name in classifiers if name.startswith("Private ::")]:
        yield PublishFinding("classifiers", f"{private[0]!r} forbids the upload", "remove it")
    elif not classifiers:
        fix = 'add classifiers = ["Programming Language :: Python :: 3"]'
        yield PublishFinding("classifiers", "missing", fix, blocks=False)
    if not raw.get("requires_python"):
        yield PublishFinding("requires-python", "missing", 'add requires-python = ">=3.11"')
    if not raw.get("project_urls"):
        yield PublishFinding("urls", "missing", 'add [project.urls] with Source = "https://..."', blocks=False)
    yield from _check_requirements(raw.get("requires_dist", ()))
    if not points:
        fix = f'add [project.entry-points."relax.plugins"] with {name or "NAME"} = "PACKAGE.plugin"'
        yield PublishFinding(
            "entry-points", f"no entry point in the group {PLUGINS} or {COMMANDS}, so Relax cannot find the plugin", fix
        )


def _check_version(text: str) -> Iterator[PublishFinding]:
    try:
        version = Version(text)
    except InvalidVersion:
        return  # `invalid_fields` names the field
    if version.release == (0,) * len(version.release):
        yield PublishFinding("version", f"{text!r} is the default of build tools", "set the version of this release")
    if version.local:
        yield PublishFinding(
            "version", f"{text!r} is a local version, which the index refuses", "remove the part after +"
        )


def _check_requirements(lines: Sequence[str]) -> Iterator[PublishFinding]:
    if not api_range(lines):
        yield PublishFinding("dependencies", "no API range", f'add "relax-core{core_range()}"')
    for line in lines:
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            continue  # `invalid_fields` names the field
        if requirement.url:
            fix = f"name a released version of {requirement.name}"
            yield PublishFinding("dependencies", f"{line!r} is a direct reference, which the index refuses", fix)


def _check_packages(names: Sequence[str]) -> Iterator[PublishFinding]:
    """Check the folders of the wheel, which become packages of the user's environment."""
    if taken := sorted({"tests", "test", "docs", "src", "examples"} & set(names)):
        fix = "list only the plugin's package under the build backend's packages"
        yield PublishFinding("packages", f"the wheel installs {', '.join(taken)} as a package of its own", fix)


def _check_components(name: str, unpacked: Path) -> Iterator[PublishFinding]:
    """Load the unpacked wheel in a fresh interpreter; yield the failed checks of the plugin and its components."""
    path = os.pathsep.join([str(unpacked), *filter(None, sys.path)])
    environ = {**os.environ, "PYTHONPATH": path, "RELAX_PLUGINS": name}
    try:
        done = subprocess.run(
            [sys.executable, "-c", _EXAMINE, name], env=environ, cwd=unpacked, capture_output=True, text=True,
            timeout=_IMPORT_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        yield PublishFinding(
            "entry-points", f"the imports take more than {_IMPORT_S:.0f} s", "import slow libraries later"
        )
        return
    if done.returncode:
        yield PublishFinding("entry-points", done.stderr.strip()[-2000:], "mend the module that the entry point names")
        return
    checks = json.loads(done.stdout.strip().splitlines()[-1])
    for item in checks:
        if item["verdict"] == "failed":
            where = item["subject"] or "entry-points"
            yield PublishFinding(where, f"{item['name']}: {item['detail']}", f"see `relax plugins check {name}`")
    if not any(item["subject"] for item in checks):
        yield PublishFinding(
            "entry-points",
            "the plugin offers no component and no command",
            "return components from a hook",
            blocks=False,
        )
