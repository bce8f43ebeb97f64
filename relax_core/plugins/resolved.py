# SPDX-License-Identifier: Apache-2.0
"""Which plugins exactly: the list that every worker compares with its own before it starts.

A released distribution is its version; an editable one or a single file can change under one version, so its content
is hashed.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from relax_core.api.errors import InfrastructureError
from relax_core.plugins.claims import find_module
from relax_core.plugins.record import Record, State


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
        if record.state is State.OK:
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
