# SPDX-License-Identifier: Apache-2.0
"""`relax plugins list | show | check` and `relax new`: what is installed, from where, what is broken and why, whether
it conforms; and a project for a plugin of one's own.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from relax_core.cli.terminal import AsJson, say

if TYPE_CHECKING:
    from relax_core.registry import Catalogue, Record
    from relax_core.registry.check import Check

OfKind = Annotated[str, typer.Option("--kind", help="Only components of this kind.")]


def complete_name(incomplete: str) -> list[str]:
    """Components and distributions that begin like this, for the shell."""
    from relax_core.registry import Catalogue

    records = Catalogue.load().records
    names = {component.name for record in records for _, component in record.components}
    return sorted(n for n in names | {record.distribution for record in records} if n.startswith(incomplete))


Named = Annotated[
    str,
    typer.Argument(help="A component, dist:component, distribution, or ./file.py.", autocompletion=complete_name),
]
verbs = typer.Typer(no_args_is_help=True, help="What is installed, what is broken and why, does it conform.")


@verbs.command("list")
def list_plugins(kind: OfKind = "", as_json: AsJson = False) -> None:
    """Every installed plugin, its components and its state."""
    _print_list(kind, as_json)


def list_without_typer(words: Sequence[str]) -> int:
    """Run `relax plugins list` on the words after it, importing next to nothing; return the exit code."""
    parser = argparse.ArgumentParser(
        "relax plugins list", description="Every installed plugin, its components and its state."
    )
    parser.add_argument("--kind", default="", help="Only components of this kind.")
    parser.add_argument("--json", action="store_true", help="One JSON document on stdout.")
    chosen = parser.parse_args(words)
    _print_list(chosen.kind, chosen.json)
    return 0


@verbs.command("show")
def show(
    name: Named,
    kind: OfKind = "",
    as_json: AsJson = False,
) -> None:
    """One component with its options and capabilities, or one plugin."""
    from relax_core.registry.check import describe, records_named

    catalogue, files = _catalogue(name)
    records = [] if kind else records_named(catalogue, files[0] if files else name)
    if records:
        shown = [record.as_dict() for record in records]
        text = [line for record in records for line in (*_lines(record), *record.frames.rstrip().splitlines())]
    else:
        shown = [describe(catalogue, *_one(catalogue, name, kind))]
        text = _component_lines(shown[0])
    if as_json:
        say(json.dumps(shown[0] if len(shown) == 1 else {"plugins": shown}, indent=2))
    else:
        say("\n".join(text))


@verbs.command("check")
def check_plugins(
    name: Named = "",
    as_json: AsJson = False,
) -> None:
    """Import, handshake, options, conformance suites, of all plugins by default; exit 3 where something fails."""
    from relax_core.registry.check import CheckResult, check

    catalogue, files = _catalogue(name)
    records = _chosen(catalogue, files[0] if files else name)
    checks: list[Check] = []
    told: set[str] = set()
    for item in check(catalogue, records, files):
        checks.append(item)
        if not as_json and item.verdict is not CheckResult.PASSED and f"{item.subject}{item.detail}" not in told:
            told.add(f"{item.subject}{item.detail}")
            say(f"{item.verdict:7} {item.subject or item.distribution}: {item.name}: {item.detail}")
    counts = Counter(str(item.verdict) for item in checks)
    if as_json:
        verdicts = {str(verdict): counts[verdict] for verdict in CheckResult}
        say(json.dumps({"schema": 1, **verdicts, "checks": [item.as_dict() for item in checks]}, indent=2))
    else:
        say(f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped")
    if counts["failed"]:
        first = next(item for item in checks if item.verdict is CheckResult.FAILED)
        say(f"relax: {first.subject or first.distribution}: {first.name} failed; fix the plugin", err=True)
        raise typer.Exit(3)


def new(
    kind: Annotated[str, typer.Argument(help="reward, environment or algorithm.")],
    name: Annotated[str, typer.Argument(help="The component's name, in kebab-case.")],
    source: Annotated[Path | None, typer.Option("--from", help="A working single-file plugin to move into it.")] = None,
    out: Annotated[Path, typer.Option("--out", help="Where the project's directory is made.")] = Path(),
) -> None:
    """Write a plugin project: code, tests with the conformance suite, packaging."""
    from relax_core.registry.templates import bake

    project = bake(kind, name, out, source)
    say(project)
    say(f"next: pip install -e '{project}[test]' && relax plugins check {project.name}", err=True)


def _print_list(kind: str, as_json: bool) -> None:
    """Print the plugins; of one kind, only those that have components of it."""
    from relax_core.registry import Catalogue
    from relax_core.registry.catalogue import known_kind

    records: Sequence[Record] = Catalogue.load().records
    if kind:
        known_kind(kind)
        kept = [replace(r, components=tuple(c for c in r.components if c.kind == kind)) for r in records]
        records = [record for record in kept if record.components]
    if as_json:
        say(json.dumps({"schema": 1, "plugins": [record.as_dict() for record in records]}, indent=2))
    else:
        say("\n".join(line for record in records for line in _lines(record)))


def _lines(record: Record) -> list[str]:
    """Describe a plugin as text: its place and state, then its components."""
    place = f"{record.location} (editable)" if record.editable else record.location
    shown = [part for part in (record.name, record.version, record.state, record.api_range or "-", place) if part]
    text = ["  ".join(shown)]
    if record.reason:
        text.append(f"    {record.reason}")
    for kind, component in record.components:
        mark = " (experimental)" if component.experimental else ""
        text.append(f"    {kind:18} {component.name:20} {component.help}{mark}")
    text += [f"    {'observer':18} {hook}" for hook in record.hooks]
    return text + [f"    note: {note}" for note in record.notes]


def _catalogue(name: str) -> tuple[Catalogue, tuple[str, ...]]:
    """Load the installed plugins, and the file where one is named instead."""
    from relax_core.registry import Catalogue

    files = (str(Path(name).resolve()),) if name.endswith(".py") else ()
    return Catalogue.load(files), files


def _one(catalogue: Catalogue, name: str, kind: str) -> tuple[str, str]:
    """Find the one component that a name means; an error says which there are."""
    from relax_core.api.errors import ConfigError
    from relax_core.registry.catalogue import missing_anywhere
    from relax_core.registry.check import components_named

    if kind:
        return kind, name
    found = components_named(catalogue, name)
    if not found:
        raise missing_anywhere(name, catalogue.records)
    if len(found) > 1:
        choices = " or ".join(f"`{qualified} --kind {of}`" for of, qualified in found)
        raise ConfigError("NAME", repr(name), f"it has several meanings; write {choices}")
    return found[0]


def _chosen(catalogue: Catalogue, name: str) -> list[Record]:
    """Choose the plugins to check; for a component, its plugin with only that component."""
    from relax_core.registry.catalogue import missing_anywhere
    from relax_core.registry.check import records_named

    if not name or (records := records_named(catalogue, name)):
        return list(catalogue.records) if not name else records
    wanted, _, bare = name.rpartition(":")
    own = [record for record in catalogue.records if wanted in ("", record.distribution, record.name)]
    kept = [replace(r, components=tuple(c for c in r.components if c.component.name == bare)) for r in own]
    if not (found := [record for record in kept if record.components]):
        raise missing_anywhere(name, catalogue.records)
    return found


def _component_lines(shown: dict[str, Any]) -> list[str]:
    lines = [f"{shown['kind']} {shown['name']}: {shown['help']}"]
    lines.append(f"    from {shown['distribution']} {shown['version']}, {shown['source'] or shown['target']}")
    lines += [f"    {line}".rstrip() for line in shown["doc"].splitlines()]
    lines.append("options" if shown["options"] else "no options")
    for option in shown["options"]:
        default = "required" if option["required"] else f"= {option['default']!r}"
        lines.append(f"    {option['name']}: {option['type']} {default}")
        lines += [f"        {line}" for line in option["doc"].splitlines()]
    lines.append("capabilities")
    return lines + [f"    {name} = {value!r}" for name, value in shown["capabilities"].items()]
