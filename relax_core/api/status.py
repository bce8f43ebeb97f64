# SPDX-License-Identifier: Apache-2.0
"""The state of a run while it goes: role states, waits with owner and deadline, commands from people."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from relax_core.api.events import Event, Span

RoleState = Literal["starting", "busy", "waiting", "paused", "stopped", "failed"]
CommandName = Literal["pause", "continue", "stop", "checkpoint"]


@dataclass(frozen=True, slots=True)
class Wait:
    """Somebody waits: for what, who owes it, since when and until when (monotonic seconds of the hub's clock)."""

    owner: str
    reason: str
    owed_by: str
    since: float
    deadline: float
    polls: bool = False
    """At the deadline it is asked for again; `since` is when that began."""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A role's heartbeat, written by its work loop."""

    role: str
    state: RoleState
    doing: str = ""
    waits: tuple[Wait, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    at: float = 0.0
    incarnation: int = 0
    pid: int = 0
    sent: float = 0.0
    """When it was made, by the role's own clock; 0: not told. The board puts `waits` and `spans` on its own."""
    spans: tuple[Span, ...] = ()
    """Of the role and its devices since the last beat, whole up to `sent`."""


@dataclass(frozen=True, slots=True)
class Command:
    """From a person or the controller to one role."""

    number: int
    name: CommandName
    argument: str = ""


class RunStatus(Protocol):
    """Where roles report and take commands; one a run."""

    async def beat(self, beat: Heartbeat) -> None: ...

    async def beats(self) -> tuple[Heartbeat, ...]: ...

    async def emit(self, event: Event) -> None:
        """Send an event to the controller, which passes it to the run directory, sinks, observers and display."""
        ...

    async def events(self, after: int, wait_s: float) -> tuple[tuple[int, Event], ...]:
        """Numbered events after `after`; waits up to `wait_s` for one."""
        ...

    async def command(self, role: str, name: CommandName, argument: str = "") -> None: ...

    async def commands(self, role: str, after: int, wait_s: float) -> tuple[Command, ...]:
        """Commands for a role after number `after`."""
        ...
