# SPDX-License-Identifier: Apache-2.0
"""The record of a plugin, and its handshake: whether it may be imported, by the environment's lists and its API range.

The range is the distribution's own requirement on relax-core, so that pip and this check read the same line. Workers
compare the list of resolved plugins with their own before they start. Nothing of a plugin is imported here.
"""

from __future__ import annotations

import hashlib
import platform
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from relax_core.api.component import Component
from relax_core.api.errors import InfrastructureError

CORE = "relax-core"
ALLOW, DENY = "RELAX_PLUGINS", "RELAX_DISABLE_PLUGINS"
_PLAIN = re.compile(r"[A-Za-z0-9._-]+\s*(?:\[[^\]]*\])?\s*((?:[<>=!~]{1,3}\s*[0-9][0-9A-Za-z.*+!-]*\s*,?\s*)*)")


class PluginState(StrEnum):
    """State of a plugin after discovery: `ok`, or one of two reasons why it offers nothing."""

    OK = "ok"
    SKIPPED = "skipped"
    """Never imported: switched off by the environment, or its API range does not hold this core."""
    BROKEN = "broken"
    """Its import or one of its hooks failed."""


class Offered(NamedTuple):
    """A component under the kind of the hook that returned it."""

    kind: str
    component: Component


@dataclass(frozen=True, slots=True)
class Record:
    """One plugin as it is known, loaded or not: an entry point, a single file, or what was passed from Python. Plain data."""

    name: str
    """The entry point's name, or the file's."""
    distribution: str
    version: str
    module: str
    location: str
    """Directory of its code; for an editable installation the project's."""
    editable: bool = False
    file: bool = False
    """A single-file plugin: it has neither distribution nor version of its own."""
    api_range: str = ""
    """Versions of relax-core that it was written for, as its own metadata says."""
    state: PluginState = PluginState.OK
    reason: str = ""
    frames: str = ""
    """The traceback inside the plugin, where it is broken."""
    components: tuple[Offered, ...] = ()
    hooks: tuple[str, ...] = ()
    """Observer hooks it implements."""
    notes: tuple[str, ...] = ()
    """Remarks for a person on a plugin that works: a name that another plugin has too."""

    @property
    def title(self) -> str:
        """The plugin as a sentence names it."""
        return f"{self.distribution} {self.version}".rstrip()

    def as_dict(self) -> dict[str, Any]:
        """The record as `relax plugins list --json` prints it."""
        return {
            "name": self.name,
            "distribution": self.distribution,
            "version": self.version,
            "location": self.location,
            "editable": self.editable,
            "api_range": self.api_range,
            "state": str(self.state),
            "reason": self.reason,
            "frames": self.frames,
            "components": [
                {
                    "kind": kind,
                    "name": component.name,
                    "target": component.target,
                    "help": component.help,
                    "experimental": component.experimental,
                }
                for kind, component in self.components
            ],
            "hooks": list(self.hooks),
            "notes": list(self.notes),
        }


def canonical(name: str) -> str:
    """Write a distribution's name as pip compares it."""
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


def api_range(requires: Iterable[str]) -> str:
    """Give the specifier of a distribution's own requirement on relax-core; empty where it states none."""
    lines = (line for line in requires if canonical(re.split(r"[^A-Za-z0-9._-]", line, maxsplit=1)[0]) == CORE)
    return ",".join(filter(None, map(_specifier, lines)))


@cache
def _specifier(line: str) -> str:
    """A requirement's version specifier, empty where its marker does not hold. Most lines are plain, and the full
    grammar takes longer to import than a hundred plugins to list."""
    if plain := _PLAIN.fullmatch(line):
        return plain[1]
    from packaging.requirements import Requirement

    requirement = Requirement(line)
    return str(requirement.specifier) if not requirement.marker or requirement.marker.evaluate() else ""


def refusal(record: Record, environ: Mapping[str, str]) -> str:
    """Say why this plugin must not be imported; empty where it may. The core's own components are always there."""
    name = canonical(record.distribution)
    if name == CORE:
        return ""

    def lists(variable: str) -> bool:
        return name in {canonical(listed) for listed in environ.get(variable, "").split(",") if listed.strip()}

    if lists(DENY):
        return f"switched off: {DENY} names it"
    if ALLOW in environ and not lists(ALLOW):
        return f"switched off: {ALLOW} is set and does not name it"
    if not record.api_range:
        return f'its metadata states no API range; add "{CORE}{core_range()}" to dependencies in its pyproject.toml'
    if not _holds(record.api_range):
        return f"it needs {CORE} {record.api_range}, and this is {core_version()}; install matching versions"
    return ""


@cache
def _holds(specifier: str) -> bool:
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(specifier).contains(core_version(), prereleases=True)


def core_range() -> str:
    """Give the range that a plugin written for this core states: the minor version is the API's."""
    from packaging.version import Version

    release = Version(core_version())
    return f">={release.major}.{release.minor},<{release.major}.{release.minor + 1}"


@cache
def core_version() -> str:
    """Look the installed core's version up."""
    try:
        return version(CORE)
    except PackageNotFoundError as error:
        raise InfrastructureError(f"{CORE} is not installed for {sys.executable}; install it there") from error


class ResolvedPlugin(NamedTuple):
    """One distribution or file; plain strings, so that it travels as JSON."""

    name: str
    version: str
    hash: str = ""

    def __str__(self) -> str:
        return " ".join(part for part in (self.version, self.hash and f"content {self.hash}") if part)


def resolve(records: Iterable[Record]) -> tuple[ResolvedPlugin, ...]:
    """List every loaded distribution and file, in order of names."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        if record.state is PluginState.OK:
            groups.setdefault(record.distribution, []).append(record)
    return tuple(ResolvedPlugin(name, own[0].version, _hash(own)) for name, own in sorted(groups.items()))


def compare(have: Sequence[ResolvedPlugin], want: Sequence[ResolvedPlugin], shared: bool) -> None:
    """Raise InfrastructureError on the first difference; `shared` compares only what both have."""
    ours, theirs = {p.name: p for p in have}, {p.name: p for p in want}
    for name in sorted(ours.keys() & theirs.keys() if shared else ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            raise InfrastructureError(
                f"plugin {name} differs on node {platform.node()}: have {ours.get(name) or 'none'}, "
                f"want {theirs.get(name) or 'none'}; install the same plugins on every node"
            )


def _hash(records: Sequence[Record]) -> str:
    """Digest of the sources of editable distributions and single files, which can change under one version; else empty."""
    if not any(record.editable or record.file for record in records):
        return ""
    digest = hashlib.blake2b(digest_size=8)
    for root in sorted({_root(record) for record in records}):
        files = [root] if root.is_file() else sorted(root.rglob("*"))
        for file in (file for file in files if file.is_file() and "__pycache__" not in file.parts):
            digest.update(f"{file.relative_to(root.parent)}\0".encode() + file.read_bytes())
    return digest.hexdigest()


def _root(record: Record) -> Path:
    """The package directory that holds the plugin's module, or the file."""
    if record.file:
        return Path(record.location)
    spec = find_module(record.module.partition(".")[0])
    if spec is None or not spec.origin:
        raise InfrastructureError(f"{record.title}: its source {record.module} is gone; install it again")
    origin = Path(spec.origin)
    return origin.parent if origin.name == "__init__.py" else origin


def find_module(module: str) -> ModuleSpec | None:
    """Find a module part by part: `importlib.util.find_spec` would import its parents."""
    path: list[str] | None = None
    spec: ModuleSpec | None = None
    parts = module.split(".")
    for end in range(1, len(parts) + 1):
        finders = (find for finder in sys.meta_path if (find := getattr(finder, "find_spec", None)))
        found = next((found for find in finders if (found := find(".".join(parts[:end]), path, None))), None)
        if not isinstance(found, ModuleSpec):
            return None
        spec, path = found, list(found.submodule_search_locations or ())
    return spec
