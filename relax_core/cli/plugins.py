# SPDX-License-Identifier: Apache-2.0
"""The verbs `relax plugins list` and `relax plugins show`; plugins add further verbs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from relax_core.cli.terminal import AsJson, Named, say

if TYPE_CHECKING:
    from relax_core.registry import Catalogue, Record
    from relax_core.registry.description import CommandDescription, ComponentDescription

OfKind = Annotated[str, typer.Option("--kind", help="Show only components of this kind, or only commands: command.")]


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
def show(name: Named, kind: OfKind = "", as_json: AsJson = False) -> None:
    """Show a component with its options and capabilities, a command, or a plugin with its components and commands."""
    from relax_core.registry.catalogue import Catalogue
    from relax_core.registry.description import describe, describe_command, named

    files = (str(Path(name).resolve()),) if name.endswith(".py") else ()
    catalogue = Catalogue.load(files)
    shown: list[dict[str, object]]
    if not kind and (records := named(catalogue, files[0] if files else name)):
        shown = [record.as_dict() for record in records]
        text = [line for record in records for line in (*_lines(record), *record.frames.rstrip().splitlines())]
    else:
        kind, name = (kind, name) if kind else _only(catalogue, name)
        described = describe_command(name) if kind == "command" else describe(catalogue, kind, name)
        shown = [described.as_dict()]
        text = _description_lines(described)
    if as_json:
        say(json.dumps(shown[0] if len(shown) == 1 else {"plugins": shown}, indent=2))
    else:
        say("\n".join(text))


def _print_list(kind: str, as_json: bool) -> None:
    """Print the plugins; with `kind`, only components of that kind, and the plugins that contain them."""
    from relax_core.registry import Catalogue
    from relax_core.registry.catalogue import known_kind

    records: Sequence[Record] = Catalogue.load().records
    if kind == "command":
        records = [replace(record, components=(), hooks=(), parts=()) for record in records if record.commands]
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
    text += [f"    {'part':18} {hook}" for hook in record.parts]
    text += [f"    {'command':18} {command.name:20} {command.help}" for command in record.commands]
    return text + [f"    note: {note}" for note in record.notes]


def _only(catalogue: Catalogue, name: str) -> tuple[str, str]:
    """Return kind and qualified name of the only component or command with this name. Raises ConfigError for several."""
    from relax_core.api.errors import ConfigError
    from relax_core.registry.description import selected

    found = [
        (kind, qualified)
        for record in selected(catalogue, name)
        for kind, qualified in (
            *((kind, f"{record.distribution}:{each.name}") for kind, each in record.components),
            *(("command", each.qualified(record.distribution)) for each in record.commands),
        )
    ]
    if len(found) > 1:
        choices = " or ".join(f"`{qualified} --kind {kind}`" for kind, qualified in found)
        raise ConfigError("NAME", repr(name), f"several components have this name; write {choices}")
    return found[0]


def _description_lines(shown: ComponentDescription | CommandDescription) -> list[str]:
    """Return the lines of a description, for people."""
    from relax_core.registry.description import ComponentDescription

    doc = [f"    {line}".rstrip() for line in shown.doc.splitlines()]
    plugin = f"{shown.distribution} {shown.version}"
    if not isinstance(shown, ComponentDescription):
        command = shown.command
        lines = [f"command {command.name}: {command.help}", f"    from {plugin}, {command.target}", *doc]
        return [*lines, f"    in the group {command.group}; relax {command.name} --help prints the options"]
    lines = [f"{shown.kind} {shown.name}: {shown.help}", f"    from {plugin}, {shown.source or shown.target}", *doc]
    lines.append("options" if shown.options else "no options")
    for option in shown.options:
        default = "required" if option.required else f"= {option.default!r}"
        lines.append(f"    {option.name}: {option.type} {default}")
        lines += [f"        {line}" for line in option.doc.splitlines()]
    lines.append("capabilities")
    return lines + [f"    {name} = {value!r}" for name, value in shown.capabilities.items()]
