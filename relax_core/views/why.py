# SPDX-License-Identifier: Apache-2.0
"""The answer of `relax why`: the chain of waits, from the role that sets the pace to the cause of the wait.

The chain is made from `status.json` alone. There each wait has a reason and names the roles that can end the wait
(`blocked_by`). Within a rollout the chain follows the oldest group under way to engines, environments or rewards. A cycle
of waiting roles is a deadlock. For an ended or lost run the answer shows the last written state. Restarts and retries
are counted from `events.jsonl`. The module also warns if engine and trainer differ by more than their number formats
explain.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from relax_core.api.checks import MISMATCH, far_apart
from relax_core.observe.first_step import fault_lines
from relax_core.observe.metrics import EventCounts, mean
from relax_core.views.run import RunHealth, RunView

Roles = Mapping[str, Mapping[str, Any]]
PACE = "actor"
AVERAGED_STEPS = 10
HELD_BY = {"engines": "the engines have no room", "steps ahead": "all steps that may be played ahead are under way"}
"""Text for each limit that keeps new groups from starting; a limit without a text is a configuration key."""


@dataclass(frozen=True, slots=True)
class Link:
    """One element of the chain of waits, and the element's current activity."""

    who: str
    """Name of a role, engine, engine pool or reward."""
    says: str
    """Activity as a verb phrase, such as `waits for rows`."""
    for_s: float | None = None
    """Seconds since the activity began; None: unknown."""
    left_s: float | None = None
    """Seconds until the wait's deadline; None: no deadline."""


def chain(roles: Sequence[Mapping[str, Any]], now: float) -> tuple[Link, ...]:
    """Follow the waits from the role that sets the pace to their cause; `now` is on the clock of the waits."""
    known = {role["role"]: role for role in roles if role.get("state") not in ("stopped", "failed")}
    links: list[Link] = []
    at = PACE if PACE in known else next(iter(known), "")
    visited: set[str] = set()
    while at and at not in visited:
        visited.add(at)
        found, at = _follow(known, at, now)
        links += found
    return tuple(links)


def blockers(blocked_by: str, roles: Roles) -> list[str]:
    """Return the roles named in a wait's `blocked_by`, in the order of the text."""
    return [name for name in re.findall(r"[\w-]+", blocked_by) if name in roles]


def _follow(roles: Roles, name: str, now: float) -> tuple[list[Link], str]:
    """Return the links of a role, and the next role of the chain (empty: none)."""
    role = roles[name]
    age = now - float(role.get("at") or now)
    if parts := list(_parts(name, role, age)):
        return parts, ""
    if wait := min(role.get("waits", ()), key=lambda wait: wait["since"], default=None):
        found = blockers(str(wait["blocked_by"]), roles)
        busy = (one for one in found if roles[one]["state"] == "busy")
        named = f", blocked by {wait['blocked_by']}" if wait["blocked_by"] else ""
        left = None if wait.get("polls") else float(wait["deadline"]) - now
        link = Link(name, f"waits for {wait['reason']}{named}", now - float(wait["since"]), left)
        return [link], next(busy, found[0] if found else "")
    at_work = Link(name, f"is {role['state']}" + (f": {role['doing']}" if role.get("doing") else ""))
    return [at_work, *_asked((role.get("facts") or {}).get("pools") or {}, age)], ""


def _parts(name: str, role: Mapping[str, Any], age: float) -> Iterator[Link]:
    """Yield the links of a rollout's oldest group and its cause; nothing if the rollout's own wait is the cause."""
    facts = role.get("facts") or {}
    groups = facts.get("under_way") or ()
    engines = facts.get("engines") or {}
    if not groups:  # the rollout may not start groups before its engines have loaded the published weights
        late = next((engine for engine in engines if engines[engine].get("loading")), "")
        if late and role.get("waits"):
            yield Link(name, "has no group under way because its engines have older weights")
            yield Link(late, engine_says(engines[late]))
        return
    group = groups[0]
    held = group["at"] == "engines" and engines and all(engine.get("paused") for engine in engines.values())
    if held and role.get("waits"):
        return
    yield Link(name, f"has {group_says(group)}", group["for_s"] + age)
    if group["at"] == "engines" and (engine := _slowest(engines)):
        yield Link(engine, engine_says(engines[engine]), engines[engine].get("silent_s", 0.0) + age)
    elif group["at"] == "rewards" and (judging := facts.get("judging")):
        unanswered = judging["rewards"]
        names = f"reward{'s' * (len(unanswered) > 1)} {', '.join(sorted(unanswered))}"
        verb = "has" if len(unanswered) == 1 else "have"
        yield Link(names, f"{verb} {sum(unanswered.values())} samples to judge", judging["for_s"] + age)
        yield from _asked(facts.get("pools") or {}, age)
    elif group["at"] == "environments":
        yield Link("environments", f"have {group['missing']} of its samples")
        yield from _asked(facts.get("pools") or {}, age)


def _asked(pools: Mapping[str, Mapping[str, Any]], age: float) -> Iterator[Link]:
    """Yield links of the auxiliary pool with the oldest open request, and of its slowest engine."""
    asked = [name for name in pools if pools[name].get("open")]
    if asked:
        name = max(asked, key=lambda name: float(pools[name]["for_s"]))
        pool, engines = pools[name], pools[name]["engines"]
        if pool.get("paused"):
            says = f"has {pool['open']} open requests and waits for its turn on the devices"
            yield Link(f"engine pool {name}", says, pool["for_s"] + age)
            return
        yield Link(f"engine pool {name}", f"has {pool['open']} open requests", pool["for_s"] + age)
        if engine := _slowest(engines):
            yield Link(engine, engine_says(engines[engine]), engines[engine].get("silent_s", 0.0) + age)


def group_says(group: Mapping[str, Any]) -> str:
    missing, samples = group["missing"], group["samples"]
    lacks = f"lacks {missing} of {samples} samples" if missing else f"has all {samples} samples"
    return f"group {group['group']} under way, which {lacks}, at the {group['at']}"


def engine_says(engine: Mapping[str, Any]) -> str:
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
    """Return the running engine that has been silent for longest, else one that does not serve; empty: none."""
    running = [name for name in engines if engines[name].get("running")]
    if running:
        return max(running, key=lambda name: float(engines[name].get("silent_s", 0.0)))
    return next((name for name in engines if not engines[name].get("serving") or engines[name].get("paused")), "")


@dataclass(frozen=True, slots=True)
class Waiting:
    """One wait of a role, with its age and remaining time in seconds."""

    role: str
    reason: str
    blocked_by: str
    for_s: float
    left_s: float
    polls: bool = False
    """True if the waiting role asks repeatedly, so that the deadline of one request does not matter."""

    def sentence(self) -> str:
        blocked = f", blocked by {self.blocked_by}" if self.blocked_by else ""
        age = so_far(self.for_s, None if self.polls else self.left_s)
        return f"{self.role} waits for {self.reason}{blocked}: {age}"


@dataclass(frozen=True, slots=True)
class WhyAnswer:
    """The answer of `relax why`: a run's state, its waits and their cause."""

    headline: str
    waits: tuple[Waiting, ...] = ()
    busy: tuple[str, ...] = ()
    """A phrase for each role that does not wait."""
    ring: tuple[str, ...] = ()
    """Roles in a deadlock, each waiting for the next."""
    chain: tuple[Link, ...] = ()
    """Links from the role that sets the pace to the cause of the wait."""
    details: tuple[str, ...] = ()
    """Lines on the oldest groups under way, the engines, and failures."""

    @property
    def culprit(self) -> str:
        """Return the name at the end of the chain, the cause of the wait; empty: none."""
        return self.chain[-1].who if self.chain else ""

    def lines(self) -> Iterator[str]:
        yield self.headline
        if self.ring:
            yield f"deadlock: {' waits for '.join((*self.ring, self.ring[0]))}"
        for depth, link in enumerate(self.chain):
            yield f"  {'  ' * depth}{'→ ' * bool(depth)}{link_says(link)}"
        shown = {link.who for link in self.chain}
        yield from (f"  {wait.sentence()}" for wait in self.waits if wait.role not in shown)
        yield from (f"  {busy}" for busy in self.busy if busy.partition(" ")[0] not in shown)
        yield from (f"  {detail}" for detail in self.details)


def why(
    status: Mapping[str, Any], health: RunHealth, wall: float, events: Iterable[Mapping[str, Any]] = ()
) -> WhyAnswer:
    """Return the answer at wall-clock time `wall`; `events` are the records of `events.jsonl`."""
    roles = status.get("roles", ())
    now = float(status.get("now", 0.0))
    if not health.ended and health.state not in ("lost", "silent"):  # these two keep the time of the last status
        now += max(wall - float(status.get("written_at", wall)), 0.0)
    open_waits = [(role, wait) for role in roles for wait in role.get("waits", ())]
    waits = tuple(
        Waiting(
            role["role"], wait["reason"], wait["blocked_by"], now - wait["since"], wait["deadline"] - now,
            wait.get("polls", False),
        )
        for role, wait in sorted(open_waits, key=lambda pair: float(pair[1]["since"]))
    )  # fmt: skip
    faults = tuple(_faults(events))
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
    """Return a sentence about one link of the chain, with its age."""
    return f"{link.who} {link.says}" + (f": {so_far(link.for_s, link.left_s)}" if link.for_s is not None else "")


def so_far(for_s: float, left_s: float | None) -> str:
    """Return the age of a wait, and the time until its deadline if it has one."""
    if left_s is None:
        return f"{seconds(for_s)} so far"
    left = f"{seconds(left_s)} left" if left_s >= 0 else f"its deadline passed {seconds(-left_s)} ago"
    return f"{seconds(for_s)} so far, {left}"


def seconds(value: float) -> str:
    """Return a duration as text, such as `1 min 5 s`."""
    value = max(value, 0.0)
    if value < 60:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def _headline(health: RunHealth, status: Mapping[str, Any], waits: tuple[Waiting, ...]) -> str:
    at = f"step {status.get('step', 0)}" + (f" of {status['steps']}" if status.get("steps") else "")
    if health.state in ("lost", "silent"):
        age = seconds(health.said_s_ago or 0.0)
        return f"stale: the run wrote its last status {age} ago at {at}; {health.detail}"
    if not status:
        return f"{health.state}: {health.detail}"
    if health.state == "paused":
        return f"paused, {at}, {health.detail}"
    return f"{health.state}, {at}; {len(waits) or 'no'} wait{'s' if len(waits) != 1 else ''}"


def _details(role: Mapping[str, Any], now: float) -> Iterator[str]:
    """Yield lines on a rollout's oldest groups, its limits, its engines, and the engines of auxiliary pools."""
    facts, age = role.get("facts") or {}, now - float(role.get("at") or now)
    for group in facts.get("under_way") or ():
        yield f"{group_says(group)}: {seconds(group['for_s'] + age)} old"
    yield from failures_say(role)
    scheduling = facts.get("scheduling") or {}
    if scheduling.get("in_play") or scheduling.get("prelaunched"):
        line = f"{scheduling['in_play']} samples in play, {scheduling['at_engines']} of them at the engines"
        if scheduling["prelaunched"]:
            line += f"; environments of {scheduling['prelaunched']} more have started (placement.rollout.prelaunch)"
        if scheduling["held_by"]:
            line += (
                f"; no new group starts: {HELD_BY.get(scheduling['held_by'], 'limited by ' + scheduling['held_by'])}"
            )
        yield line
    pools = (facts.get("pools") or {}).values()
    for name, engine in [item for part in (facts, *pools) for item in (part.get("engines") or {}).items()]:
        silent = engine.get("silent_s", 0.0)
        yield f"{name} {engine_says(engine)}" + (f", silent for {seconds(silent + age)}" if silent else "")


def failures_say(role: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line on each kind of failure among a rollout's newest samples."""
    failures = (role.get("facts") or {}).get("failures") or {}
    for kind in failures.get("kinds", ()):
        newest = f"; newest: {kind['error']}" if kind["error"] else ""
        yield f"{kind['count']} of the last {failures['of']} samples failed: {kind['outcome']} of {kind['component']}{newest}"


def _faults(events: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Yield lines on restarts and retries of the run, and on dropped events."""
    counts, last = EventCounts(), ""
    for record in events:
        counts.count(record)
        if record["event"] == "run restarted":
            last = f"after step {record['step']}: {record['reason']}"
    if last:
        yield f"the run last restarted {last}"
    for group in ("restarts", "retries"):
        if found := counts.by_name(group):
            yield f"{group} so far: {', '.join(f'{role} {count}' for role, count in found.items())}"
    if dropped := counts["events/dropped"]:
        yield f"{dropped:,} events were dropped before they were written, so the run's files lack them"


def _busy(role: Mapping[str, Any]) -> str:
    doing = f": {role['doing']}" if role.get("doing") else ""
    return f"{role['role']} is {role['state']}{doing}"


def _ring(roles: Any, waits: tuple[Waiting, ...]) -> tuple[str, ...]:
    """Return a cycle of idle roles in which each role's oldest wait is for the next role; empty: none."""
    idle = {role["role"] for role in roles if role.get("state") == "waiting"}
    blocked: dict[str, str] = {}
    for wait in waits:
        if wait.role in idle:
            blocked.setdefault(wait.role, wait.blocked_by)
    for start in blocked:
        path: list[str] = []
        at: str | None = start
        while at in blocked and at not in path:
            path.append(at)
            at = blocked.get(at)
        if at == start and len(path) > 1:
            return tuple(path)
    return ()


def log_prob_difference(steps: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the mean |log-prob difference| of engine and trainer over the last steps that report it, else None."""
    values = [float(step[MISMATCH]) for step in steps if step.get(MISMATCH) is not None][-AVERAGED_STEPS:]
    return sum(values) / len(values) if values else None


def first_step_faults(run: RunView) -> list[str]:
    """Return a line for each check of step 1 that failed or warns."""
    return [line for step, checks in run.first_steps().items() for line in fault_lines(checks, step)]


def mismatch_warning(run: RunView) -> str:
    """Return a warning if engine and trainer differ by more than their number formats explain; else empty."""
    difference, limit = log_prob_difference(run.metrics()), far_apart(run.config)
    if difference is None or difference <= limit:
        return ""
    model, rollout = run.config.get("model", {}), run.config.get("rollout", {})
    trainer = str(model.get("dtype") or "float32")
    engine = str(rollout.get("dtype") or trainer)
    cause = "check that both have the same weights, tokens and temperature"
    if float(rollout.get("top_p") or 1.0) < 1.0 or rollout.get("top_k"):
        cause = "rollout.top_p or rollout.top_k truncates the engine's distribution, but not the trainer's"
    return (
        f"engine and trainer differ by {difference:.2g} (mean |log-prob difference| without lag): more than the {limit:g} "
        f"that the formats {engine} and {trainer} explain; {cause}"
    )


FEWEST_STEPS = 3
"""Steps needed before a rank is reported as slow; fewer would blame whichever rank had the most tokens."""
SLOW_RANK = 1.2
"""Multiple of the median rank's time from which a rank counts as slow."""


def slow_rank_warning(run: RunView) -> str:
    """Return a warning if the same rank of the actor was much slower than the median rank in recent steps; else empty."""
    recent = [
        (int(line["trainer/slowest_rank"]), float(line["trainer/slowest_rank_ratio"]))
        for line in run.metrics()[-AVERAGED_STEPS:]
        if line.get("trainer/slowest_rank_ratio") is not None
    ]
    slow = {rank for rank, _ in recent}
    ratio = mean([ratio for _, ratio in recent]) or 0.0
    if len(recent) < FEWEST_STEPS or len(slow) > 1 or ratio < SLOW_RANK:
        return ""
    return (
        f"rank {slow.pop()} of the actor takes {ratio:.1f} times as long as the median rank, and was the slowest in the "
        f"last {len(recent)} steps: look for other programs, heat or a fault on its device"
    )
