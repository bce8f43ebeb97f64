# SPDX-License-Identifier: Apache-2.0
"""The content of `status.json`, and the mark of a machine."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from typing import Any

from relax_core.api.role import Heartbeat, Wait

_HEARTBEAT = {field.name for field in fields(Heartbeat)} - {"waits", "spans", "sent"}


def status_document(
    heartbeats: Sequence[Heartbeat], now: float, wall: float, facts: Mapping[str, Any]
) -> dict[str, object]:
    """Return the content of `status.json`: heartbeats, and facts of the run (state, step, steps, run_id).

    `now` (the clock of the heartbeats) and `written_at` (wall clock) are read together, so readers can compute ages
    from the wall clock alone. Spans are left out, since the trace contains them.
    """
    roles = [asdict(replace(each, spans=())) for each in sorted(heartbeats, key=lambda each: each.role)]
    return {
        **facts,
        "written_at": wall,
        "now": now,
        "pid": os.getpid(),
        "host": host_mark(),
        "roles": [{key: value for key, value in role.items() if key not in ("spans", "sent")} for role in roles],
    }


def heartbeats(status: Mapping[str, Any]) -> tuple[Heartbeat, ...]:
    """Return the roles' heartbeats of a status document, with times of the wall clock in seconds."""
    shift = float(status["written_at"]) - float(status["now"])
    found = []
    for role in status.get("roles", ()):
        waits = tuple(
            Wait(**{**wait, "since": wait["since"] + shift, "deadline": wait["deadline"] + shift})
            for wait in role.get("waits", ())
        )
        known = {key: value for key, value in role.items() if key in _HEARTBEAT}
        found.append(Heartbeat(**{**known, "at": float(role.get("at") or 0.0) + shift}, waits=waits))
    return tuple(found)


def status_key(heartbeats: Sequence[Heartbeat]) -> tuple[object, ...]:
    """Return the visible part of the heartbeats; the recorder writes a new status when this key changes."""
    in_order = sorted(heartbeats, key=lambda each: each.role)
    return tuple((each.role, each.state, each.doing, each.waits, each.registration) for each in in_order)


def host_mark() -> str:
    """Return a hash of this machine's name, by which readers know whether a process id is of their machine."""
    return hashlib.sha256(platform.node().encode()).hexdigest()[:12]
