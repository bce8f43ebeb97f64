# SPDX-License-Identifier: Apache-2.0
"""Whether a plugin may be imported at all: the environment's lists and the API range, from metadata alone.

The range is the distribution's own requirement on relax-core, so that pip and this check read the same line.

Which plugins exactly: the list that every worker compares with its own before it starts.

A released distribution is its version; an editable one or a single file can change under one version, so its content
is hashed.
"""

from __future__ import annotations

import hashlib
import platform
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from relax_core.api.errors import InfrastructureError
from relax_core.registry.record import PluginState, Record, find_module

CORE = "relax-core"
ALLOW, DENY = "RELAX_PLUGINS", "RELAX_DISABLE_PLUGINS"


_PLAIN = re.compile(r"[A-Za-z0-9._-]+\s*(?:\[[^\]]*\])?\s*((?:[<>=!~]{1,3}\s*[0-9][0-9A-Za-z.*+!-]*\s*,?\s*)*)")


def canonical(name: str) -> str:
    """A distribution's name as pip compares it."""
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


def api_range(requires: Iterable[str]) -> str:
    """The specifier of a distribution's own requirement on relax-core; empty where it states none."""
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
    """Why this plugin must not be imported; empty where it may. The core's own components are always there."""
    if canonical(record.distribution) == CORE:
        return ""
    return _switched_off(record, environ) or _out_of_range(record)


def _switched_off(record: Record, environ: Mapping[str, str]) -> str:
    name = canonical(record.distribution)
    if name in _names(environ.get(DENY, "")):
        return f"switched off: {DENY} names it"
    if ALLOW in environ and name not in _names(environ[ALLOW]):
        return f"switched off: {ALLOW} is set and does not name it"
    return ""


def _names(value: str) -> frozenset[str]:
    return frozenset(canonical(name) for name in value.split(",") if name.strip())


def _out_of_range(record: Record) -> str:
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
    """The range that a plugin written for this core states: the minor version is the API's."""
    from packaging.version import Version

    release = Version(core_version())
    return f">={release.major}.{release.minor},<{release.major}.{release.minor + 1}"


@cache
def core_version() -> str:
    """The installed core's version."""
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
    """Every loaded distribution and file, in order of names."""
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
    if not any(record.editable or record.file for record in records):
        return ""
    digest = hashlib.blake2b(digest_size=8)
    for root in sorted({_root(record) for record in records}):
        for file in _files(root):
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


def _files(root: Path) -> Iterator[Path]:
    if root.is_file():
        return iter((root,))
    return (f for f in sorted(root.rglob("*")) if f.is_file() and "__pycache__" not in f.parts)
