# SPDX-License-Identifier: Apache-2.0
"""Guards against divergence as a state machine: the metrics of a step go in, what to do about it comes out. No IO, no clock.

Steps are its time. The owner, which is the actor, acts before the weights of the step reach any engine.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

from relax_core.config.guard_tables import Guard, GuardAction, GuardsTable
from relax_core.rpc.waiting import RestartBudget

SEVERITY: dict[GuardAction, int] = {"off": 0, "warn": 1, "pause": 2, "roll-back": 3, "stop": 4}


@dataclass(frozen=True, slots=True)
class GuardFinding:
    """A guard that fires, and why."""

    guard: str
    action: GuardAction
    metric: str
    value: float
    bound: float
    """The one that the value is beyond."""
    since: int
    """First step of the evidence."""
    step: int
    reason: str


@dataclass(slots=True)
class _Watched:
    """One guard's own state."""

    values: deque[tuple[int, float]]
    """Of steps without evidence, or whose evidence was acted upon: what the median is taken of."""
    evidence: list[tuple[int, float]] = field(default_factory=list)
    """Of steps in a row, up to the newest."""
    fired: bool = False
    """On this evidence."""


class DivergenceGuards:
    """Every guard of a run that is on.

    A guard: `quiet -> evidence -> fired -> quiet`, where a step without evidence leads from anywhere to `quiet`.

    Invariants:
    - A guard fires in the step in which its evidence has lasted for `steps` steps, and only once on one row of evidence.
    - The median that a value is compared with is of steps before the evidence: a slow collapse does not move it.
    - A step whose metrics lack a guard's number, or have one that is not finite, changes nothing for that guard.
    - Rollbacks are at most `rollbacks` until the run has got `window` steps beyond the last; the next one is a stop.
    """

    def __init__(self, table: GuardsTable) -> None:
        self._window, self._guards = table.window, table.chosen()
        self._watched = {name: _Watched(deque(maxlen=table.window)) for name in self._guards}
        self._metrics: deque[tuple[int, Mapping[str, float]]] = deque(maxlen=table.window)
        self._rollbacks, self._rolled_back_from = RestartBudget(table.rollbacks), 0
        self._unseen = {name for name, guard in self._guards.items() if SEVERITY[guard.action] > SEVERITY["warn"]}
        self._judged = 0

    @property
    def window(self) -> tuple[tuple[int, Mapping[str, float]], ...]:
        """Metrics of the last steps, the newest one included."""
        return tuple(self._metrics)

    @property
    def suspects(self) -> bool:
        """Tell whether the newest step is evidence for a guard that may still hold, undo or end the run because of it.

        No checkpoint should be made of such a step: the run could not go back behind it.
        """
        return any(
            watched.evidence and not watched.fired and SEVERITY[self._guards[name].action] > SEVERITY["warn"]
            for name, watched in self._watched.items()
        )

    def take_blind(self) -> list[str]:
        """Return, once, the guards that are to do more than warn, and whose number no step of a whole window had."""
        if self._judged < self._window:
            return []
        blind, self._unseen = sorted(self._unseen), set()
        return blind

    def judge(self, step: int, metrics: Mapping[str, float]) -> list[GuardFinding]:
        """Take the metrics of the next step; return the guards that fire, the most severe first."""
        self._metrics.append((step, metrics))
        self._judged += 1
        self._unseen -= {name for name in self._unseen if self._guards[name].metric in metrics}
        if step > self._rolled_back_from + self._window:
            self._rollbacks.refill()
        findings = [
            finding for name, guard in self._guards.items()
            if (finding := self._judge(name, guard, step, metrics.get(guard.metric))) is not None
        ]  # fmt: skip
        findings.sort(key=lambda finding: -SEVERITY[finding.action])
        if findings and findings[0].action == "roll-back":  # several that ask for it are one
            self._rolled_back_from = max(self._rolled_back_from, step)
            if not self._rollbacks.spend():
                limit = self._rollbacks.limit
                spent = f"; guards.rollbacks allows {limit}, which did not help" if limit else "; guards.rollbacks is 0"
                findings = [_stopping(one, spent) if one.action == "roll-back" else one for one in findings]
        return findings

    def rewind(self, step: int) -> None:
        """Forget steps after this one: they are undone. The budget of rollbacks remembers."""
        self._metrics = deque((pair for pair in self._metrics if pair[0] <= step), self._window)
        for watched in self._watched.values():
            watched.values = deque((pair for pair in watched.values if pair[0] <= step), self._window)
            watched.evidence = [pair for pair in watched.evidence if pair[0] <= step]
            watched.fired = watched.fired and bool(watched.evidence)

    def _judge(self, name: str, guard: Guard, step: int, value: float | None) -> GuardFinding | None:
        if value is None or not math.isfinite(value):
            return None
        watched = self._watched[name]
        bound, why = _bound(guard, [value for _, value in watched.values], self._window)
        beyond = value < bound if guard.falls else value > bound
        if not beyond:
            watched.values.extend((*(() if watched.fired else watched.evidence), (step, value)))
            watched.evidence, watched.fired = [], False
            return None
        watched.evidence.append((step, value))
        if watched.fired:
            watched.values.append((step, value))
            del watched.evidence[:-1]
            return None
        if len(watched.evidence) < guard.steps:
            return None
        watched.fired, since = True, watched.evidence[0][0]
        watched.values.extend(watched.evidence)
        steps = f"step {step}" if since == step else f"steps {since} to {step}"
        reason = f"{guard.metric} was {value:.4g} at {steps}, {'below' if guard.falls else 'above'} {bound:.4g}, {why}"
        return GuardFinding(name, guard.action, guard.metric, value, bound, since, step, reason)


def _bound(guard: Guard, before: list[float], window: int) -> tuple[float, str]:
    """Return the bound that is met first, and its name; infinite where there is none yet.

    A relative bound is as far from the median as the median times the ratio, also of a negative one.
    """
    sign = -1.0 if guard.falls else 1.0
    bounds = [] if guard.limit is None else [(guard.limit, "its limit")]
    if guard.ratio is not None and len(before) >= window // 2:
        middle = median(before)
        distance = max(abs(guard.ratio - 1.0) * abs(middle), guard.least)
        bounds.append((middle + sign * distance, f"as the median of {len(before)} steps before was {middle:.4g}"))
    return min(bounds, key=lambda bound: sign * bound[0], default=(sign * math.inf, ""))


def _stopping(finding: GuardFinding, spent: str) -> GuardFinding:
    return GuardFinding(
        finding.guard, "stop", finding.metric, finding.value, finding.bound, finding.since, finding.step,
        finding.reason + spent,
    )  # fmt: skip
