# SPDX-License-Identifier: Apache-2.0
"""Who owes it, in the end: from the role that sets the pace along its wait to whoever makes everybody wait.

Made of role states as `status.json` has them. A rollout's own parts (engines, environments, rewards) are followed by
the oldest group under way; where the chain comes back to itself, nobody can move.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Roles = Mapping[str, Mapping[str, Any]]
PACE = "actor"


@dataclass(frozen=True, slots=True)
class Link:
    """One of those that are waited for, and what it is at itself."""

    who: str
    says: str
    for_s: float | None = None
    """How long it has been at that."""
    left_s: float | None = None
    """Until its deadline, where it has one."""


def chain(roles: Sequence[Mapping[str, Any]], now: float) -> tuple[Link, ...]:
    """From the pace-maker on; the last one is who owes it. `now` is on the clock of the waits."""
    known = {role["role"]: role for role in roles if role.get("state") not in ("stopped", "failed")}
    links: list[Link] = []
    at = PACE if PACE in known else next(iter(known), "")
    visited: set[str] = set()
    while at and at not in visited:
        visited.add(at)
        found, at = _follow(known, at, now)
        links += found
    return tuple(links)


def debtors(owed_by: str, roles: Roles) -> list[str]:
    """Roles that a wait names, in its order."""
    return [name for name in re.findall(r"[\w-]+", owed_by) if name in roles]


def _follow(roles: Roles, name: str, now: float) -> tuple[list[Link], str]:
    """What one role is at, and the role to look at next."""
    role = roles[name]
    age = now - float(role.get("at") or now)
    if parts := list(_parts(name, role, age)):
        return parts, ""
    if wait := oldest_wait(role):
        owing = debtors(str(wait["owed_by"]), roles)
        busy = (one for one in owing if roles[one]["state"] == "busy")
        named = f", owed by {wait['owed_by']}" if wait["owed_by"] else ""
        left = None if wait.get("polls") else float(wait["deadline"]) - now
        link = Link(name, f"waits for {wait['reason']}{named}", now - float(wait["since"]), left)
        return [link], next(busy, owing[0] if owing else "")
    at_work = Link(name, f"is {role['state']}" + (f": {role['doing']}" if role.get("doing") else ""))
    return [at_work, *_asked((role.get("facts") or {}).get("pools") or {}, age)], ""


def oldest_wait(role: Mapping[str, Any]) -> Mapping[str, Any] | None:
    found: Mapping[str, Any] | None = min(role.get("waits", ()), key=lambda wait: wait["since"], default=None)
    return found


def _parts(name: str, role: Mapping[str, Any], age: float) -> Iterator[Link]:
    """A rollout with groups under way is waited for because of its oldest one. Nothing where its own wait is why."""
    facts = role.get("facts") or {}
    groups = facts.get("under_way") or ()
    engines = facts.get("engines") or {}
    if not groups:
        yield from _loading(name, role, engines)
        return
    group = groups[0]
    held = group["at"] == "engines" and engines and all(engine.get("paused") for engine in engines.values())
    if held and role.get("waits"):
        return
    yield Link(name, f"has {group_says(group)}", group["for_s"] + age)
    if group["at"] == "engines" and (engine := _slowest(engines)):
        yield Link(engine, engine_says(engines[engine]), engines[engine].get("silent_s", 0.0) + age)
    elif group["at"] == "rewards" and (judging := facts.get("judging")):
        names, owed = _rewards(judging)
        yield Link(names, f"owe{'s' * (len(judging['rewards']) == 1)} {owed} verdicts", judging["for_s"] + age)
        yield from _asked(facts.get("pools") or {}, age)
    elif group["at"] == "environments":
        yield Link("environments", f"have {group['missing']} of its samples")
        yield from _asked(facts.get("pools") or {}, age)


def _asked(pools: Mapping[str, Mapping[str, Any]], age: float) -> Iterator[Link]:
    """The pool beside the policy's that has owed an answer for longest, and its engine."""
    owing = [name for name in pools if pools[name].get("open")]
    if owing:
        name = max(owing, key=lambda name: float(pools[name]["for_s"]))
        pool, engines = pools[name], pools[name]["engines"]
        yield Link(f"engine pool {name}", f"owes {pool['open']} answers", pool["for_s"] + age)
        if engine := _slowest(engines):
            yield Link(engine, engine_says(engines[engine]), engines[engine].get("silent_s", 0.0) + age)


def _loading(name: str, role: Mapping[str, Any], engines: Mapping[str, Mapping[str, Any]]) -> Iterator[Link]:
    """No leave to start groups while the engines have yet to load what was published."""
    late = next((engine for engine in engines if engines[engine].get("loading")), "")
    if late and role.get("waits"):
        yield Link(name, "has no group under way, as its engines have older weights")
        yield Link(late, engine_says(engines[late]))


def group_says(group: Mapping[str, Any]) -> str:
    """One group under way, in words."""
    missing, samples = group["missing"], group["samples"]
    lacks = f"lacks {missing} of {samples} samples" if missing else f"waits with its {samples} samples"
    return f"group {group['group']} under way, which {lacks}, at the {group['at']}"


def engine_says(engine: Mapping[str, Any]) -> str:
    """One engine, in words."""
    if engine.get("loading"):
        return f"(version {engine['version']}) loads {engine['loading']}"
    if engine.get("paused"):
        return f"(version {engine['version']}) is paused with {engine['running']} requests"
    if not engine.get("serving"):
        return f"(version {engine['version']}) does not serve"
    return f"(version {engine['version']}) runs {engine['running']} requests"


def _slowest(engines: Mapping[str, Mapping[str, Any]]) -> str:
    """The one that has said nothing for longest, of those that run something; else one that does not serve."""
    running = [name for name in engines if engines[name].get("running")]
    if running:
        return max(running, key=lambda name: float(engines[name].get("silent_s", 0.0)))
    return next((name for name in engines if not engines[name].get("serving") or engines[name].get("paused")), "")


def _rewards(judging: Mapping[str, Any]) -> tuple[str, int]:
    owed = judging["rewards"]
    return f"reward{'s' * (len(owed) > 1)} {', '.join(sorted(owed))}", sum(owed.values())
