# SPDX-License-Identifier: Apache-2.0
"""`relax plugins list`, apart from the other verbs because it imports next to nothing.

Typer converts every value through pydantic, so the command line takes this verb before Typer sees it; the command of
the same name in `plugins.py` is for help and completion.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from relax_core.registry import Record

WORDS = ("plugins", "list")


def run(words: Sequence[str]) -> None:
    """The words after `relax plugins list`."""
    parser = argparse.ArgumentParser(
        "relax plugins list", description="Every installed plugin, its components and its state."
    )
    parser.add_argument("--kind", default="", help="Only components of this kind.")
    parser.add_argument("--json", action="store_true", help="One JSON document on stdout.")
    chosen = parser.parse_args(words)
    show(chosen.kind, chosen.json)


def show(kind: str, as_json: bool) -> None:
    """Print the plugins; of one kind, only those that have components of it."""
    from relax_core.registry import Catalogue
    from relax_core.registry.catalogue import known_kind

    records: Sequence[Record] = Catalogue.load().records
    if kind:
        known_kind(kind)
        kept = [replace(r, components=tuple(c for c in r.components if c.kind == kind)) for r in records]
        records = [record for record in kept if record.components]
    if as_json:
        print(json.dumps({"schema": 1, "plugins": [record.as_dict() for record in records]}, indent=2))
    else:
        print("\n".join(line for record in records for line in lines(record)))


def lines(record: Record) -> list[str]:
    """A plugin as text: where it is and how it stands, then what it offers."""
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
