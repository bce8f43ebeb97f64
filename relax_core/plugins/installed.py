# SPDX-License-Identifier: Apache-2.0
"""Installed plugins as their metadata tells them: nothing of a plugin is imported here.

One record an entry point of the group `relax.plugins`, refused ones with their reason.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from email.message import Message
from email.parser import HeaderParser
from importlib.metadata import Distribution, EntryPoint, entry_points
from urllib.parse import unquote, urlparse

from relax_core.plugins.handshake import api_range, refusal
from relax_core.plugins.record import Record, State

GROUP = "relax.plugins"


def installed(environ: Mapping[str, str]) -> Iterator[Record]:
    """Every installed plugin, ordered by distribution, not loaded yet."""
    entries = [(entry, entry.dist) for entry in entry_points(group=GROUP)]
    found = [(entry, dist, _headers(dist)) for entry, dist in entries if dist is not None]
    for entry, dist, headers in sorted(found, key=lambda item: (str(item[2]["Name"]), item[0].name)):
        yield _handshaken(entry, dist, headers, environ)


def _handshaken(entry: EntryPoint, dist: Distribution, headers: Message, environ: Mapping[str, str]) -> Record:
    record = _record(entry, dist, headers)
    try:
        record = replace(record, api_range=api_range(headers.get_all("Requires-Dist", [])))
        reason = refusal(record, environ)
    except ValueError as error:
        return replace(record, state=State.BROKEN, reason=f"its metadata is damaged ({error}); install it again")
    return replace(record, state=State.SKIPPED, reason=reason) if reason else record


def _headers(dist: Distribution) -> Message:
    """Only the header block: descriptions can be long, and a hundred of them are read on every start."""
    text = dist.read_text("METADATA") or dist.read_text("PKG-INFO") or ""
    return HeaderParser().parsestr(text.partition("\n\n")[0])


def _record(entry: EntryPoint, dist: Distribution, headers: Message) -> Record:
    project = _editable_project(dist)
    return Record(
        name=entry.name,
        distribution=str(headers["Name"] or entry.name),
        version=str(headers["Version"] or ""),
        module=entry.value,
        location=project or str(dist.locate_file("")),
        editable=bool(project),
    )


def _editable_project(dist: Distribution) -> str:
    """The project's directory of an editable installation, else empty."""
    try:
        origin = json.loads(dist.read_text("direct_url.json") or "{}")
    except ValueError:
        return ""  # a damaged note on the origin says nothing, and nothing depends on it
    editable = origin.get("dir_info", {}).get("editable")
    return unquote(urlparse(origin["url"]).path) if editable else ""
