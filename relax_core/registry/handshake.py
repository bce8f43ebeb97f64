# SPDX-License-Identifier: Apache-2.0
"""Records of plugins, and the handshake: a check, before the import of a plugin, that the plugin may be imported.

The decision depends on environment variables that list plugins, and on the plugin's API range. The range is the
distribution's own requirement on relax-core, so that pip and this check read the same line. Workers compare the list of
resolved plugins with their own before they start.
"""

from __future__ import annotations

import hashlib
import platform
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import cache
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from relax_core.api.errors import InfrastructureError

if TYPE_CHECKING:
    from relax_core.api.command import RelaxCommand
    from relax_core.api.component import Component

CORE = "relax-core"
ALLOW, DENY = "RELAX_PLUGINS", "RELAX_DISABLE_PLUGINS"
_PLAIN = re.compile(r"[A-Za-z0-9._-]+\s*(?:\[[^\]]*\])?\s*((?:[<>=!~]{1,3}\s*[0-9][0-9A-Za-z.*+!-]*\s*,?\s*)*)")


class PluginState(StrEnum):
    """The state of a plugin after discovery: `ok`, or the reason why its components can't be used."""

    OK = "ok"
    SKIPPED = "skipped"
    """The plugin was not imported: it is switched off, or its API range does not include this core's version."""
    BROKEN = "broken"
    """The import or a hook of the plugin failed."""


class Offered(NamedTuple):
    """A component with its kind; the hook that returned the component determines the kind."""

    kind: str
    component: Component


@dataclass(frozen=True, slots=True)
class Record:
    """Plain data about one plugin, loaded or not.

    A plugin is an entry point, a single file, a distribution that has only commands, or the classes passed from Python.
    """

    name: str
    """Name of the entry point, file or distribution."""
    distribution: str
    version: str
    module: str
    """Module that the entry point names; empty for a plugin without components."""
    location: str
    """Directory of the plugin's code, or of the project if the installation is editable; path of a single file."""
    editable: bool = False
    file: bool = False
    """True for a single-file plugin, which has no version and the file's name as its distribution."""
    api_range: str = ""
    """Versions of relax-core that the plugin's metadata requires."""
    state: PluginState = PluginState.OK
    reason: str = ""
    frames: str = ""
    """Traceback inside a broken plugin."""
    components: tuple[Offered, ...] = ()
    hooks: tuple[str, ...] = ()
    """Observer hooks that the plugin implements."""
    parts: tuple[str, ...] = ()
    """Part hooks that the plugin implements."""
    commands: tuple[RelaxCommand, ...] = ()
    notes: tuple[str, ...] = ()
    """Remarks for users, such as the remark that a second plugin uses the same name."""

    @property
    def title(self) -> str:
        """Distribution and version, for messages."""
        return f"{self.distribution} {self.version}".rstrip()

    def as_dict(self) -> dict[str, object]:
        """Return the record as `relax plugins list --json` prints it."""
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
            "parts": list(self.parts),
            "commands": [asdict(command) for command in self.commands],
            "notes": list(self.notes),
        }


def canonical(name: str) -> str:
    """Return a distribution's name in the normalized form that pip compares."""
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


def api_range(requires: Iterable[str]) -> str:
    """Return the version specifier of a distribution's requirement on relax-core; empty without such a requirement."""
    lines = (line for line in requires if canonical(re.split(r"[^A-Za-z0-9._-]", line, maxsplit=1)[0]) == CORE)
    return ",".join(filter(None, map(_specifier, lines)))


@cache
def _specifier(line: str) -> str:
    """Return a requirement's version specifier; empty if its marker does not apply.

    A simple pattern parses most lines, because importing `packaging` takes longer than listing a hundred plugins.
    """
    if plain := _PLAIN.fullmatch(line):
        return plain[1]
    from packaging.requirements import Requirement

    requirement = Requirement(line)
    return str(requirement.specifier) if not requirement.marker or requirement.marker.evaluate() else ""


def refusal(record: Record, environ: Mapping[str, str]) -> str:
    """Return why a plugin must not be imported; empty if the import is allowed, as it always is for the core."""
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
        return f'its metadata has no API range; add "{CORE}{core_range()}" to dependencies in its pyproject.toml'
    if not _holds(record.api_range):
        return f"it needs {CORE} {record.api_range}, but {core_version()} is installed; install matching versions"
    return ""


@cache
def _holds(specifier: str) -> bool:
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(specifier).contains(core_version(), prereleases=True)


def core_range() -> str:
    """Return the API range for plugins written for this core: all versions with its major and minor version."""
    from packaging.version import Version

    release = Version(core_version())
    return f">={release.major}.{release.minor},<{release.major}.{release.minor + 1}"


@cache
def core_version() -> str:
    """Return the version of the installed core."""
    try:
        return version(CORE)
    except PackageNotFoundError as error:
        raise InfrastructureError(f"{CORE} is not installed for {sys.executable}; install it there") from error


class ResolvedPlugin(NamedTuple):
    """A loaded distribution or file, as plain strings that can be sent as JSON."""

    name: str
    version: str
    hash: str = ""

    def __str__(self) -> str:
        return " ".join(part for part in (self.version, self.hash and f"content {self.hash}") if part)


def resolve(records: Iterable[Record]) -> tuple[ResolvedPlugin, ...]:
    """Return every loaded distribution and file, sorted by name; a distribution with commands only is not loaded."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        if record.state is PluginState.OK and record.module:
            groups.setdefault(record.distribution, []).append(record)
    return tuple(ResolvedPlugin(name, own[0].version, _hash(own)) for name, own in sorted(groups.items()))


def compare(have: Sequence[ResolvedPlugin], want: Sequence[ResolvedPlugin], shared: bool) -> None:
    """Raise InfrastructureError on the first difference. `shared`: compare only plugins that both lists have."""
    ours, theirs = {p.name: p for p in have}, {p.name: p for p in want}
    for name in sorted(ours.keys() & theirs.keys() if shared else ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            raise InfrastructureError(
                f"plugin {name} differs on node {platform.node()}: have {ours.get(name) or 'none'}, "
                f"want {theirs.get(name) or 'none'}; install the same plugins on every node"
            )


def _hash(records: Sequence[Record]) -> str:
    """Return a digest of editable sources and single files, which change without a new version; empty for the rest."""
    if not any(record.editable or record.file for record in records):
        return ""
    digest = hashlib.blake2b(digest_size=8)
    for root in sorted({_root(record) for record in records}):
        files = [root] if root.is_file() else sorted(root.rglob("*"))
        for file in (file for file in files if file.is_file() and "__pycache__" not in file.parts):
            digest.update(f"{file.relative_to(root.parent)}\0".encode() + file.read_bytes())
    return digest.hexdigest()


def _root(record: Record) -> Path:
    """Return the directory of the plugin's top-level package, or its single file."""
    if record.file:
        return Path(record.location)
    spec = find_module(record.module.partition(".")[0])
    if spec is None or not spec.origin:
        raise InfrastructureError(f"{record.title}: the source of {record.module} is missing; install the plugin again")
    origin = Path(spec.origin)
    return origin.parent if origin.name == "__init__.py" else origin


def find_module(module: str) -> ModuleSpec | None:
    """Return a module's spec; unlike `importlib.util.find_spec`, never import the module's parent packages."""
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
