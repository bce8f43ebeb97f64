# SPDX-License-Identifier: Apache-2.0
"""`relax why`: what the step waits for, along the chain to who owes it; every wait, since when and until when.

Made from `status.json` alone; what a wait means is said by the role that waits. Of a run that has ended or was lost it
tells the state that was last known.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from relax_core.views.chain import Link, chain, engine_says, group_says
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
    polls: bool = False
    """It asks again and again, so that its deadline is none."""

    def sentence(self) -> str:
        who = self.owner if self.owner in ("", self.role) else f"{self.role} ({self.owner})"
        owed = f", owed by {self.owed_by}" if self.owed_by else ""
        return f"{who or self.role} waits for {self.reason}{owed}: {so_far(self.for_s, None if self.polls else self.left_s)}"


@dataclass(frozen=True, slots=True)
class Answer:
    """Why a run does not move, or that it does."""

    headline: str
    waits: tuple[Waiting, ...] = ()
    busy: tuple[str, ...] = ()
    """Roles at work, with what they do."""
    ring: tuple[str, ...] = ()
    """Roles that wait for each other."""
    chain: tuple[Link, ...] = ()
    """From the role that sets the pace to who owes it in the end."""
    details: tuple[str, ...] = ()
    """Oldest groups under way, and engines."""

    @property
    def culprit(self) -> str:
        """Who owes it in the end."""
        return self.chain[-1].who if self.chain else ""

    def lines(self) -> Iterator[str]:
        yield self.headline
        if self.ring:
            yield f"nobody can move: {' waits for '.join((*self.ring, self.ring[0]))}"
        for depth, link in enumerate(self.chain):
            yield f"  {'  ' * depth}{'→ ' * bool(depth)}{link_says(link)}"
        told = {link.who for link in self.chain}
        yield from (f"  {wait.sentence()}" for wait in self.waits if wait.role not in told)
        yield from (f"  {busy}" for busy in self.busy if busy.partition(" ")[0] not in told)
        yield from (f"  {detail}" for detail in self.details)


def why(status: Mapping[str, Any], health: Health, wall: float) -> Answer:
    """The answer at wall-clock time `wall`."""
    roles = status.get("roles", ())
    now = float(status.get("now", 0.0))
    if not health.ended and health.state not in ("lost", "silent"):  # those are told as they were at their last word
        now += max(wall - float(status.get("written_at", wall)), 0.0)
    waits = tuple(_waits(roles, now))
    if health.ended:
        after = f": {health.detail}" if health.detail else ""
        headline = f"the run has ended: {health.state} after step {status.get('step', '?')}{after}"
        return Answer(headline, waits, tuple(_busy(role) for role in roles if role.get("state") == "failed"))
    busy = tuple(_busy(role) for role in roles if not role.get("waits"))
    details = tuple(line for role in roles for line in _details(role, now))
    return Answer(_headline(health, status, waits), waits, busy, _ring(roles, waits), chain(roles, now), details)


def link_says(link: Link) -> str:
    """One link of the chain, with its age."""
    return f"{link.who} {link.says}" + (f": {so_far(link.for_s, link.left_s)}" if link.for_s is not None else "")


def so_far(for_s: float, left_s: float | None) -> str:
    """How long it has lasted, and until when it may."""
    if left_s is None:
        return f"{seconds(for_s)} so far"
    left = f"{seconds(left_s)} left" if left_s >= 0 else f"its deadline passed {seconds(-left_s)} ago"
    return f"{seconds(for_s)} so far, {left}"


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
            role["role"],
            wait["owner"],
            wait["reason"],
            wait["owed_by"],
            now - wait["since"],
            wait["deadline"] - now,
            wait.get("polls", False),
        )
        for role in roles
        for wait in role.get("waits", ())
    ]
    return iter(sorted(found, key=lambda wait: -wait.for_s))


def _details(role: Mapping[str, Any], now: float) -> Iterator[str]:
    """What a rollout has under way: its oldest groups, and its engines; and those of other pools."""
    facts, age = role.get("facts") or {}, now - float(role.get("at") or now)
    for group in facts.get("under_way") or ():
        yield f"{group_says(group)}: {seconds(group['for_s'] + age)} old"
    pools = (facts.get("pools") or {}).values()
    for name, engine in [one for part in (facts, *pools) for one in (part.get("engines") or {}).items()]:
        silent = engine.get("silent_s", 0.0)
        yield f"{name} {engine_says(engine)}" + (f", silent for {seconds(silent + age)}" if silent else "")


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
