# SPDX-License-Identifier: Apache-2.0
"""The verbs `relax plugins list | show | check | publish`, and `relax new`, which creates a plugin project."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from relax_core.cli.terminal import AsJson, say

if TYPE_CHECKING:
    from relax_core.registry import Catalogue, Record
    from relax_core.registry.check import CheckOutcome

OfKind = Annotated[str, typer.Option("--kind", help="Show only components of this kind, or only commands: command.")]


def complete_name(incomplete: str) -> list[str]:
    """Return the names of components, commands and distributions that start with `incomplete`, for shell completion."""
    from relax_core.registry import Catalogue

    records = Catalogue.load().records
    names = {component.name for record in records for _, component in record.components}
    names |= {command.name for record in records for command in record.commands}
    return sorted(n for n in names | {record.distribution for record in records} if n.startswith(incomplete))


Named = Annotated[
    str,
    typer.Argument(
        help="A component, distribution:component, distribution, or ./file.py.", autocompletion=complete_name
    ),
]
verbs = typer.Typer(
    no_args_is_help=True, help="List, show and check installed plugins; check a project before its upload."
)


@verbs.command("list")
def list_plugins(kind: OfKind = "", as_json: AsJson = False) -> None:
    """List every installed plugin with its components and state."""
    _print_list(kind, as_json)


def list_without_typer(words: Sequence[str]) -> int:
    """Run `relax plugins list` with the given arguments, without importing typer's helpers; return the exit code."""
    parser = argparse.ArgumentParser(
        "relax plugins list", description="List every installed plugin with its components and state."
    )
    parser.add_argument("--kind", default="", help="Show only components of this kind, or only commands: command.")
    parser.add_argument("--json", action="store_true", help="Print one JSON document on stdout.")
    chosen = parser.parse_args(words)
    _print_list(chosen.kind, chosen.json)
    return 0


@verbs.command("show")
def show(
    name: Named,
    kind: OfKind = "",
    as_json: AsJson = False,
) -> None:
    """Show a component with its options and capabilities, a command, or a plugin with its components and commands."""
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
    slow: Annotated[
        bool, typer.Option("--slow", help="Also run the suites of engines and trainers, which take minutes.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check plugins: import, handshake, options, conformance suites.

    All plugins are checked by default. Slow suites run with --slow, or if NAME is given. Progress goes to stderr. The
    exit code is 3 if a check fails.
    """
    from relax_core.registry.check import CheckResult, check

    catalogue, files = _catalogue(name)
    records = _chosen(catalogue, files[0] if files else name)
    checks: list[CheckOutcome] = []
    shown: set[str] = set()
    for item in check(catalogue, records, files, slow=slow or bool(name), progress=partial(say, err=True)):
        checks.append(item)
        if not as_json and item.verdict is not CheckResult.PASSED and f"{item.subject}{item.detail}" not in shown:
            shown.add(f"{item.subject}{item.detail}")
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


@verbs.command("publish")
def publish_plugin(
    project: Annotated[Path, typer.Argument(help="Folder of the plugin's project, with a pyproject.toml.")] = Path(),
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only check; keep no built files.")] = False,
    isolated: Annotated[
        bool,
        typer.Option(
            "--isolation/--no-isolation", help="Install the build backend for the build, or use the installed."
        ),
    ] = True,
    as_json: AsJson = False,
) -> None:
    """Check a plugin project before its upload to a package index: build, metadata, entry points, components.

    Relax uploads nothing. Without --dry-run, the built files are kept in the folder dist of the project, and the command
    that uploads the files is printed. The exit code is 3 if the project must be corrected before an upload.
    """
    from relax_core.registry.publish import publish

    say(f"building {project.resolve()}", err=True)
    done = publish(project, dry_run=dry_run, isolated=isolated)
    if as_json:
        say(json.dumps(done.as_dict(), indent=2))
    else:
        for finding in done.findings:
            say(finding)
        for file in done.files:
            say(file)
    if not done.ready:
        count = sum(finding.blocks for finding in done.findings)
        say(f"relax: {project}: {count} findings block the upload; correct them", err=True)
        raise typer.Exit(3)
    if done.files:
        say(f"next: twine upload {' '.join(map(str, done.files))}", err=True)
    else:
        say("ready: without --dry-run, the built files are kept and the command that uploads them is printed", err=True)


def new(
    kind: Annotated[
        str,
        typer.Argument(
            help="Kind of component, such as reward, sink or sampler, or command: `relax plugins list` shows kinds."
        ),
    ],
    name: Annotated[str, typer.Argument(help="Name of the component or command, in kebab-case.")],
    source: Annotated[
        Path | None, typer.Option("--from", help="A single-file plugin to move into the project.")
    ] = None,
    out: Annotated[Path, typer.Option("--out", help="Folder in which the project folder is created.")] = Path(),
    spdx: Annotated[
        str, typer.Option("--license", help="License of the project, as an SPDX expression such as MIT.")
    ] = "Apache-2.0",
) -> None:
    """Create a plugin project with code, tests and packaging."""
    from relax_core.registry.templates import bake

    project = bake(kind, name, out, source, spdx)
    say(project)
    say(f"next: pip install -e '{project}[test]' && relax plugins check {project.name}", err=True)


def _print_list(kind: str, as_json: bool) -> None:
    """Print the plugins; with `kind`, only components of that kind, and the plugins that contain them."""
    from relax_core.registry import Catalogue
    from relax_core.registry.catalogue import known_kind

    records: Sequence[Record] = Catalogue.load().records
    if kind == "command":
        records = [replace(record, components=(), hooks=()) for record in records if record.commands]
    elif kind:
        known_kind(kind)
        kept = [replace(r, components=tuple(c for c in r.components if c.kind == kind)) for r in records]
        records = [replace(record, commands=()) for record in kept if record.components]
    if as_json:
        say(json.dumps({"schema": 1, "plugins": [record.as_dict() for record in records]}, indent=2))
    else:
        say("\n".join(line for record in records for line in _lines(record)))


def _lines(record: Record) -> list[str]:
    """Return a plugin as lines of text: its location and state, then its components."""
    place = f"{record.location} (editable)" if record.editable else record.location
    shown = [part for part in (record.name, record.version, record.state, record.api_range or "-", place) if part]
    text = ["  ".join(shown)]
    if record.reason:
        text.append(f"    {record.reason}")
    for kind, component in record.components:
        mark = " (experimental)" if component.experimental else ""
        text.append(f"    {kind:18} {component.name:20} {component.help}{mark}")
    text += [f"    {'observer':18} {hook}" for hook in record.hooks]
    text += [f"    {'command':18} {command.name:20} {command.help}" for command in record.commands]
    return text + [f"    note: {note}" for note in record.notes]


def _catalogue(name: str) -> tuple[Catalogue, tuple[str, ...]]:
    """Return (catalogue, plugin files); a `name` that ends with `.py` is such a file, which the catalogue includes."""
    from relax_core.registry import Catalogue

    files = (str(Path(name).resolve()),) if name.endswith(".py") else ()
    return Catalogue.load(files), files


def _one(catalogue: Catalogue, name: str, kind: str) -> tuple[str, str]:
    """Return (kind, name) of the only component with this name; raise an error listing the candidates if not unique."""
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
        raise ConfigError("NAME", repr(name), f"several components have this name; write {choices}")
    return found[0]


def _chosen(catalogue: Catalogue, name: str) -> list[Record]:
    """Return the plugins to check: all, those with this name, or those with this component or command, reduced to it."""
    from relax_core.registry.catalogue import missing_anywhere
    from relax_core.registry.check import records_named

    if not name or (records := records_named(catalogue, name)):
        return list(catalogue.records) if not name else records
    wanted, _, bare = name.rpartition(":")
    own = [record for record in catalogue.records if wanted in ("", record.distribution, record.name)]
    kept = [
        replace(
            record,
            components=tuple(offered for offered in record.components if offered.component.name == bare),
            commands=tuple(command for command in record.commands if command.name == bare),
        )
        for record in own
    ]
    if not (found := [record for record in kept if record.components or record.commands]):
        raise missing_anywhere(name, catalogue.records)
    return found


def _component_lines(shown: dict[str, Any]) -> list[str]:
    lines = [f"{shown['kind']} {shown['name']}: {shown['help']}"]
    lines.append(f"    from {shown['distribution']} {shown['version']}, {shown.get('source') or shown['target']}")
    lines += [f"    {line}".rstrip() for line in shown["doc"].splitlines()]
    if shown["kind"] == "command":
        return [*lines, f"    in the group {shown['group']}; relax {shown['name']} --help prints the options"]
    lines.append("options" if shown["options"] else "no options")
    for option in shown["options"]:
        default = "required" if option["required"] else f"= {option['default']!r}"
        lines.append(f"    {option['name']}: {option['type']} {default}")
        lines += [f"        {line}" for line in option["doc"].splitlines()]
    lines.append("capabilities")
    return lines + [f"    {name} = {value!r}" for name, value in shown["capabilities"].items()]
