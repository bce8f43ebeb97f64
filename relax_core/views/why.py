# SPDX-License-Identifier: Apache-2.0
"""`relax why`: who waits for what, who owes it, since when and until when; and the ring, where nobody can move.

Made from `status.json` alone; what a wait means is said by the role that waits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from relax_core.views.health import Health


@dataclass(frozen=True, slots=True)
class Waiting:
    """One wait, in seconds before and after now."""

    role: str
    owner: str
    reason: str
    owed_by: str
    for_s: float
    left_s: float

    def sentence(self) -> str:
        who = self.owner if self.owner in ("", self.role) else f"{self.role} ({self.owner})"
        until = (
            f"{seconds(self.left_s)} left" if self.left_s >= 0 else f"its deadline passed {seconds(-self.left_s)} ago"
        )
        owed = f", owed by {self.owed_by}" if self.owed_by else ""
        return f"{who or self.role} waits for {self.reason}{owed}: {seconds(self.for_s)} so far, {until}"


@dataclass(frozen=True, slots=True)
class Answer:
    """Why a run does not move, or that it does."""

    headline: str
    waits: tuple[Waiting, ...] = ()
    busy: tuple[str, ...] = ()
    """Roles at work, with what they do."""
    ring: tuple[str, ...] = ()
    """Roles that wait for each other."""

    def lines(self) -> Iterator[str]:
        yield self.headline
        if self.ring:
            yield f"nobody can move: {' waits for '.join((*self.ring, self.ring[0]))}"
        yield from (f"  {wait.sentence()}" for wait in self.waits)
        yield from (f"  {busy}" for busy in self.busy)


def why(status: Mapping[str, Any], health: Health, wall: float) -> Answer:
    """The answer at wall-clock time `wall`."""
    if health.ended:
        return Answer(f"the run has ended: {health.state} after step {status.get('step', '?')}")
    now = float(status.get("now", 0.0)) + max(wall - float(status.get("written_at", wall)), 0.0)
    roles = status.get("roles", ())
    waits = tuple(_waits(roles, now))
    busy = tuple(_busy(role) for role in roles if not role.get("waits"))
    return Answer(_headline(health, status, waits), waits, busy, _ring(roles, waits))


def seconds(value: float) -> str:
    """A duration for people."""
    value = max(value, 0.0)
    if value < 60:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def _headline(health: Health, status: Mapping[str, Any], waits: tuple[Waiting, ...]) -> str:
    at = f"step {status.get('step', 0)}" + (f" of {status['steps']}" if status.get("steps") else "")
    if health.state in ("lost", "silent"):
        age = seconds(health.said_s_ago or 0.0)
        return f"this is stale: the run last spoke {age} ago at {at}; {health.detail}"
    if not status:
        return f"{health.state}: {health.detail}"
    return f"{health.state}, {at}; {len(waits) or 'no'} wait{'s' if len(waits) != 1 else ''}"


def _waits(roles: Any, now: float) -> Iterator[Waiting]:
    found = [
        Waiting(
            role["role"], wait["owner"], wait["reason"], wait["owed_by"], now - wait["since"], wait["deadline"] - now
        )
        for role in roles
        for wait in role.get("waits", ())
    ]
    return iter(sorted(found, key=lambda wait: -wait.for_s))


def _busy(role: Mapping[str, Any]) -> str:
    doing = f": {role['doing']}" if role.get("doing") else ""
    return f"{role['role']} is {role['state']}{doing}"


def _ring(roles: Any, waits: tuple[Waiting, ...]) -> tuple[str, ...]:
    """A circle of idle roles that owe each other; each role's oldest wait counts."""
    idle = {role["role"] for role in roles if role.get("state") == "waiting"}
    owed: dict[str, str] = {}
    for wait in waits:
        if wait.role in idle:
            owed.setdefault(wait.role, wait.owed_by)
    for start in owed:
        path: list[str] = []
        at: str | None = start
        while at in owed and at not in path:
            path.append(at)
            at = owed.get(at)
        if at == start and len(path) > 1:
            return tuple(path)
    return ()
