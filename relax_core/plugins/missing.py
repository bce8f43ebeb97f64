# SPDX-License-Identifier: Apache-2.0
"""The error for a name that no loaded plugin offers: broken, switched off, of another kind, not installed, or mistyped."""

from __future__ import annotations

from collections.abc import Sequence

from relax_core.api.errors import ConfigError, PluginError, RelaxError
from relax_core.api.kinds import KINDS, Kind
from relax_core.plugins.claims import claims
from relax_core.plugins.handshake import canonical
from relax_core.plugins.known import KNOWN
from relax_core.plugins.nearest import did_you_mean
from relax_core.plugins.record import Record, State


def missing(kind: Kind, name: str, records: Sequence[Record]) -> RelaxError:
    """What to say, most certain cause first."""
    wanted, _, bare = name.rpartition(":")
    field = kind.table or kind.name
    if record := _would_offer(kind, wanted, bare, records):
        return _unloaded(kind, bare, record)
    if fix := _elsewhere(kind, wanted, bare, records) or _installable(kind, wanted, bare, records):
        return ConfigError(field, repr(name), fix)
    known = [component.name for record in records for of, component in record.components if of == kind.name]
    return ConfigError(field, repr(name), f"no plugin offers it; {did_you_mean(bare, known)}{_failures(records)}")


def _would_offer(kind: Kind, wanted: str, name: str, records: Sequence[Record]) -> Record | None:
    home = KNOWN.get(kind.name, {}).get(name, "")
    for record in (record for record in records if record.state is not State.OK):
        named = wanted in (record.distribution, record.name) if wanted else canonical(record.distribution) == home
        if named or (not wanted and claims(record, kind.hook, name)):
            return record
    return None


def _unloaded(kind: Kind, name: str, record: Record) -> RelaxError:
    if record.state is State.SKIPPED:
        return ConfigError(
            kind.table or kind.name, repr(name), f"{record.title} has it and was skipped: {record.reason}"
        )
    return PluginError(f"{kind.name} {name!r}", f"{record.title} has it and is broken: {record.reason}", record.frames)


def _elsewhere(kind: Kind, wanted: str, name: str, records: Sequence[Record]) -> str:
    """The same name of another distribution, or of another kind."""
    for record in records:
        for of, component in record.components:
            if component.name == name and of == kind.name and wanted:
                return f"{record.title} has it; write {record.distribution}:{name}"
    for record in records:
        for of, component in record.components:
            if component.name == name and not wanted:
                return f"{record.title} has it as {of}; it belongs in [{KINDS[of].table or of}]"
    return ""


def _installable(kind: Kind, wanted: str, name: str, records: Sequence[Record]) -> str:
    home = KNOWN.get(kind.name, {}).get(name, "")
    if not home or wanted not in ("", home):
        return ""
    for record in records:
        if canonical(record.distribution) == home:
            return f"{record.title} does not have it yet; pip install --upgrade {home}"
    return f"it is not installed; pip install {home}"


def _failures(records: Sequence[Record]) -> str:
    names = ", ".join(record.title for record in records if record.state is State.BROKEN)
    return f" ({names} failed to load: see `relax plugins list`)" if names else ""


def missing_anywhere(name: str, records: Sequence[Record]) -> RelaxError:
    """The same for a name without a kind: the first kind that has a word to say on it."""
    wanted, _, bare = name.rpartition(":")
    for kind in KINDS.values():
        if record := _would_offer(kind, wanted, bare, records):
            return _unloaded(kind, bare, record)
        if fix := _installable(kind, wanted, bare, records):
            return ConfigError("NAME", repr(name), f"as {kind.name}, {fix}")
    known = {component.name for record in records for _, component in record.components}
    known |= {record.distribution for record in records}
    return ConfigError("NAME", repr(name), f"no plugin has it; {did_you_mean(bare, known)}{_failures(records)}")
