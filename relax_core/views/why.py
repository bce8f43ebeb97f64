# SPDX-License-Identifier: Apache-2.0
"""`relax why`: the chain of waits, from the role that sets the pace to whoever makes everybody wait.

It is made from `status.json` alone, where each role says what it waits for and which role owes it (its debtor). Of a
run that has ended or was lost it gives the state that was last known. A rollout's own parts (engines, environments,
rewards) are followed by the oldest group under way; where the chain comes back to itself, nobody can move. Beside the
waits it warns where engine and trainer disagree by more than their number formats explain.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from relax_core.views.first_step import MEAN, far_apart
from relax_core.views.run import RunHealth, RunView

Roles = Mapping[str, Mapping[str, Any]]
PACE = "actor"
AVERAGED_STEPS = 10
HELD_BY = {"engines": "the engines have no room", "steps ahead": "as many steps as are played ahead are under way"}
"""What may hold a group back, said in words; other names are those of options."""


@dataclass(frozen=True, slots=True)
class Link:
    """One of those that are waited for, and what it is at itself."""

    who: str
    says: str
    for_s: float | None = None
    """Seconds that it has been at that."""
    left_s: float | None = None
    """Seconds until its deadline, where it has one."""


def chain(roles: Sequence[Mapping[str, Any]], now: float) -> tuple[Link, ...]:
    """Follow the waits from the role that sets the pace to who owes them. `now` is on the clock of the waits."""
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
    """Return what one role does now, and the role to look at next."""
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
        owed = judging["rewards"]
        names = f"reward{'s' * (len(owed) > 1)} {', '.join(sorted(owed))}"
        yield Link(names, f"owe{'s' * (len(owed) == 1)} {sum(owed.values())} verdicts", judging["for_s"] + age)
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
        if pool.get("paused"):
            says = f"owes {pool['open']} answers and waits for its turn on the devices"
            yield Link(f"engine pool {name}", says, pool["for_s"] + age)
            return
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
    """Describe one group under way."""
    missing, samples = group["missing"], group["samples"]
    lacks = f"lacks {missing} of {samples} samples" if missing else f"waits with its {samples} samples"
    return f"group {group['group']} under way, which {lacks}, at the {group['at']}"


def engine_says(engine: Mapping[str, Any]) -> str:
    """Describe one engine."""
    if engine.get("loading"):
        return f"(version {engine['version']}) loads {engine['loading']}"
    if engine.get("paused"):
        return f"(version {engine['version']}) is paused with {engine['running']} requests"
    if not engine.get("serving"):
        return f"(version {engine['version']}) does not serve"
    cache = ""
    if capacity := engine.get("kv_capacity"):
        idle = f", {engine['kv_idle']:,} of sessions between turns" * bool(engine["kv_idle"])
        cache = f", which hold {engine['kv_running']:,} of {capacity:,} cache tokens{idle}"
    return f"(version {engine['version']}) runs {engine['running']} requests{cache}"


def _slowest(engines: Mapping[str, Mapping[str, Any]]) -> str:
    """The one that has said nothing for longest, of those that run something; else one that does not serve."""
    running = [name for name in engines if engines[name].get("running")]
    if running:
        return max(running, key=lambda name: float(engines[name].get("silent_s", 0.0)))
    return next((name for name in engines if not engines[name].get("serving") or engines[name].get("paused")), "")


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
    """Set where it asks again and again, so that its deadline is none."""

    def sentence(self) -> str:
        who = self.owner if self.owner in ("", self.role) else f"{self.role} ({self.owner})"
        owed = f", owed by {self.owed_by}" if self.owed_by else ""
        return f"{who or self.role} waits for {self.reason}{owed}: {so_far(self.for_s, None if self.polls else self.left_s)}"


@dataclass(frozen=True, slots=True)
class WhyAnswer:
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
        """Return the one who owes the wait in the end."""
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


def why(status: Mapping[str, Any], health: RunHealth, wall: float) -> WhyAnswer:
    """The answer at wall-clock time `wall`."""
    roles = status.get("roles", ())
    now = float(status.get("now", 0.0))
    if not health.ended and health.state not in ("lost", "silent"):  # those are told as they were at their last word
        now += max(wall - float(status.get("written_at", wall)), 0.0)
    waits = tuple(_waits(roles, now))
    faults = tuple(_faults(status))
    if health.ended:
        after = f": {health.detail}" if health.detail else ""
        headline = f"the run has ended: {health.state} after step {status.get('step', '?')}{after}"
        return WhyAnswer(
            headline, waits, tuple(_busy(role) for role in roles if role.get("state") == "failed"), details=faults
        )
    busy = tuple(_busy(role) for role in roles if not role.get("waits"))
    details = (*(line for role in roles for line in _details(role, now)), *faults)
    return WhyAnswer(_headline(health, status, waits), waits, busy, _ring(roles, waits), chain(roles, now), details)


def link_says(link: Link) -> str:
    """Describe one link of the chain, with its age."""
    return f"{link.who} {link.says}" + (f": {so_far(link.for_s, link.left_s)}" if link.for_s is not None else "")


def so_far(for_s: float, left_s: float | None) -> str:
    """Say how long it has lasted, and until when it may."""
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


def _headline(health: RunHealth, status: Mapping[str, Any], waits: tuple[Waiting, ...]) -> str:
    at = f"step {status.get('step', 0)}" + (f" of {status['steps']}" if status.get("steps") else "")
    if health.state in ("lost", "silent"):
        age = seconds(health.said_s_ago or 0.0)
        return f"this is stale: the run last spoke {age} ago at {at}; {health.detail}"
    if not status:
        return f"{health.state}: {health.detail}"
    if health.state == "paused":
        return f"paused, {at}, {health.detail}"
    return f"{health.state}, {at}; {len(waits) or 'no'} wait{'s' if len(waits) != 1 else ''}"


def _waits(roles: Any, now: float) -> Iterator[Waiting]:
    found = [(role, wait) for role in roles for wait in role.get("waits", ())]
    for role, wait in sorted(found, key=lambda one: float(one[1]["since"])):
        for_s, left_s, polls = now - wait["since"], wait["deadline"] - now, wait.get("polls", False)
        yield Waiting(role["role"], wait["owner"], wait["reason"], wait["owed_by"], for_s, left_s, polls)


def _details(role: Mapping[str, Any], now: float) -> Iterator[str]:
    """Yield what a rollout has under way: its oldest groups, its engines, and those of other pools."""
    facts, age = role.get("facts") or {}, now - float(role.get("at") or now)
    for group in facts.get("under_way") or ():
        yield f"{group_says(group)}: {seconds(group['for_s'] + age)} old"
    if scheduling := facts.get("scheduling"):
        yield from _scheduling_says(scheduling)
    pools = (facts.get("pools") or {}).values()
    for name, engine in [one for part in (facts, *pools) for one in (part.get("engines") or {}).items()]:
        silent = engine.get("silent_s", 0.0)
        yield f"{name} {engine_says(engine)}" + (f", silent for {seconds(silent + age)}" if silent else "")


def _scheduling_says(scheduling: Mapping[str, Any]) -> Iterator[str]:
    """Yield how many samples are in play, and what keeps others from being begun."""
    if not (scheduling["in_play"] or scheduling["prelaunched"]):
        return
    line = f"{scheduling['in_play']} samples in play, {scheduling['at_engines']} of them at the engines"
    if scheduling["prelaunched"]:
        line += f"; environments of {scheduling['prelaunched']} more have started (placement.rollout.prelaunch)"
    if scheduling["held_by"]:
        line += f"; no group is begun: {HELD_BY.get(scheduling['held_by'], 'bounded by ' + scheduling['held_by'])}"
    yield line


def _faults(status: Mapping[str, Any]) -> Iterator[str]:
    """Yield the faults that the run went on after, and events that are missing."""
    if last := status.get("last_restart"):
        yield f"the whole run restarted last after step {last['step']}: {last['reason']}"
    for name in ("restarts", "retries"):
        if counts := status.get(name):
            yield f"{name} so far: {', '.join(f'{role} {count}' for role, count in counts.items())}"
    if dropped := status.get("events_dropped"):
        yield f"{dropped:,} events were dropped before they were written: files of the run lack them"


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


def log_prob_difference(steps: Sequence[Mapping[str, Any]]) -> float | None:
    """Average the difference of engine and trainer over the last steps that have it."""
    values = [float(step[MEAN]) for step in steps if step.get(MEAN) is not None][-AVERAGED_STEPS:]
    return sum(values) / len(values) if values else None


def mismatch_warning(run: RunView) -> str:
    """Say in a sentence that number formats do not explain the difference; empty where they do."""
    found = log_prob_difference(run.metrics())
    if found is None:
        return ""
    model, rollout = run.config.get("model", {}), run.config.get("rollout", {})
    own = str(model.get("dtype") or "float32")
    engine = str(rollout.get("dtype") or own)
    limit = far_apart(run.config)
    if found <= limit:
        return ""
    cause = "do they have the same weights, tokens and temperature?"
    if float(rollout.get("top_p") or 1.0) < 1.0:
        cause = "rollout.top_p is below 1, which the trainer does not know"
    return (
        f"engine and trainer are {found:.2g} apart (mean |log-prob difference| without lag), more than {limit:g}: "
        f"{engine} and {own} alone do not do that; {cause}"
    )
