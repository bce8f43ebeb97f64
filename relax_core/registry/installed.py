# SPDX-License-Identifier: Apache-2.0
"""Discovery of installed plugins and commands by the metadata of their distributions; nothing is imported."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from email.message import Message
from email.parser import HeaderParser
from importlib.metadata import Distribution, EntryPoint, entry_points
from urllib.parse import unquote, urlparse

from relax_core.api.command import COMMANDS, RelaxCommand
from relax_core.api.errors import ConfigError
from relax_core.registry.handshake import PluginState, Record, api_range, refusal

PLUGINS = "relax.plugins"


def installed(environ: Mapping[str, str], entries: Iterable[EntryPoint] | None = None) -> Iterator[Record]:
    """Yield a record for each installed plugin, and for each distribution with commands only, sorted by distribution.

    `entries`: only these entry points, instead of all that are installed.
    """
    if entries is None:
        found = entry_points()
        entries = [*found.select(group=PLUGINS), *found.select(group=COMMANDS)]
    by_distribution: dict[Distribution, list[EntryPoint]] = defaultdict(list)
    for entry in entries:
        if entry.dist is not None:
            by_distribution[entry.dist].append(entry)
    headers = {distribution: header(distribution) for distribution in by_distribution}
    for distribution in sorted(headers, key=lambda each: str(headers[each]["Name"])):
        yield from _records(distribution, headers[distribution], by_distribution[distribution], environ)


def _records(
    distribution: Distribution, headers: Message, entries: Iterable[EntryPoint], environ: Mapping[str, str]
) -> Iterator[Record]:
    """Yield the records of one distribution. The record with the distribution's name, or else the first, has its commands."""
    name, project = str(headers["Name"] or ""), _editable_project(distribution)
    plugins: dict[str, str] = {}
    commands: dict[str, RelaxCommand] = {}
    notes: list[str] = []
    for entry in sorted(entries, key=lambda entry: entry.name):
        if entry.group == PLUGINS:
            plugins[entry.name] = entry.value
            continue
        try:
            command = RelaxCommand.parse(entry)
        except ConfigError as error:
            notes.append(f"a command is left out: {error}")
            continue
        if commands.setdefault(command.name, command) is not command:
            notes.append(f"a command is left out: {entry.name!r} has the name of another command; rename it")
    plugins = plugins or {name: ""}
    home = name if name in plugins else next(iter(plugins))
    for plugin, module in plugins.items():
        record = Record(
            name=plugin,
            distribution=name or plugin,
            version=str(headers["Version"] or ""),
            module=module,
            location=project or str(distribution.locate_file("")),
            editable=bool(project),
            commands=tuple(commands.values()) if plugin == home else (),
            notes=tuple(notes) if plugin == home else (),
        )
        try:
            record = replace(record, api_range=api_range(headers.get_all("Requires-Dist", [])))
            reason = refusal(record, environ)
        except ValueError as error:
            reason = f"its metadata is damaged ({error}); install the plugin again"
            yield replace(record, state=PluginState.BROKEN, reason=reason)
            continue
        yield replace(record, state=PluginState.SKIPPED, reason=reason) if reason else record


def header(distribution: Distribution) -> Message:
    """Parse only the header block of a distribution's metadata: every start reads many files, some very long."""
    text = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or ""
    return HeaderParser().parsestr(text.partition("\n\n")[0])


def _editable_project(distribution: Distribution) -> str:
    """Return the project directory of an editable installation; empty for a normal one."""
    try:
        origin = json.loads(distribution.read_text("direct_url.json") or "{}")
    except ValueError:
        return ""  # the origin is only shown, so a damaged file is ignored
    editable = origin.get("dir_info", {}).get("editable")
    return unquote(urlparse(origin["url"]).path) if editable else ""
