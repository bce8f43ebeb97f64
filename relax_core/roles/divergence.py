# SPDX-License-Identifier: Apache-2.0
"""Guards against divergence: a pure state machine from the metrics of each step to the actions to take.

Time is counted in steps. The actor takes the action before the step's weights reach any engine.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import median

from relax_core.config.guard_tables import Guard, GuardAction, GuardsTable
from relax_core.rpc.waiting import RestartBudget

SEVERITY: dict[GuardAction, int] = {"off": 0, "warn": 1, "pause": 2, "roll-back": 3, "stop": 4}


@dataclass(frozen=True, slots=True)
class GuardFinding:
    """A guard that fires at a step, with its evidence."""

    guard: str
    action: GuardAction
    metric: str
    value: float
    bound: float
    """The bound that `value` exceeds; for a guard with `falls`, the bound that `value` is below."""
    since: int
    """First of the consecutive steps beyond the bound."""
    step: int
    reason: str


@dataclass(slots=True)
class _Watched:
    """The state of one guard."""

    values: deque[tuple[int, float]]
    """(step, metric) pairs from which the median is computed: values within the bound, and evidence that has fired."""
    evidence: list[tuple[int, float]] = field(default_factory=list)
    """(step, metric) pairs of consecutive steps beyond the bound, up to the newest step."""
    fired: bool = False
    """True once the guard has fired on this evidence."""


class DivergenceGuards:
    """The enabled guards of a run.

    A guard: `quiet -> evidence -> fired -> quiet`. Evidence is a step with a metric beyond the guard's bound. A step
    within the bound leads from every state to `quiet`.

    Invariants:
    - A guard fires at the step at which its evidence has lasted for `steps` consecutive steps, once for each such
      sequence.
    - A value is compared with the median of steps before the evidence, so a slow collapse does not move the median.
    - A step does not change a guard if its metric is missing or not finite.
    - At most `guards.rollbacks` rollbacks are made until the run is `guards.window` steps beyond the last rollback. A
      further rollback becomes a stop.
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
        """(step, metrics) of the last `guards.window` steps, including the newest."""
        return tuple(self._metrics)

    @property
    def suspects(self) -> bool:
        """True if the newest step is evidence for a guard that may still pause, roll back or stop the run.

        Such a step should not become the newest checkpoint: a rollback must reach a step before the evidence.
        """
        return any(
            watched.evidence and not watched.fired and SEVERITY[self._guards[name].action] > SEVERITY["warn"]
            for name, watched in self._watched.items()
        )

    def take_blind(self) -> list[str]:
        """Return the guards that do more than warn, but have never got their metric from any step.

        Nothing is returned during the first `guards.window` steps. Each guard is returned only once.
        """
        if self._judged < self._window:
            return []
        blind, self._unseen = sorted(self._unseen), set()
        return blind

    def judge(self, step: int, metrics: Mapping[str, float]) -> list[GuardFinding]:
        """Take the metrics of the next step; return a finding for each guard that fires, the most severe first."""
        self._metrics.append((step, metrics))
        self._judged += 1
        self._unseen -= {name for name in self._unseen if self._guards[name].read(metrics)[1] is not None}
        if step > self._rolled_back_from + self._window:
            self._rollbacks.refill()
        findings = [
            finding for name, guard in self._guards.items()
            if (finding := self._judge(name, guard, step, *guard.read(metrics))) is not None
        ]  # fmt: skip
        findings.sort(key=lambda finding: -SEVERITY[finding.action])
        if findings and findings[0].action == "roll-back":  # several findings make one rollback
            self._rolled_back_from = max(self._rolled_back_from, step)
            if not self._rollbacks.spend():
                limit = self._rollbacks.limit
                spent = f"; guards.rollbacks allows {limit}, and all are used" if limit else "; guards.rollbacks is 0"
                findings = [
                    replace(finding, action="stop", reason=finding.reason + spent)
                    if finding.action == "roll-back"
                    else finding
                    for finding in findings
                ]
        return findings

    def rewind(self, step: int) -> None:
        """Delete the state of steps after `step`, because a rollback undid them. Used rollbacks still count."""
        self._metrics = deque((pair for pair in self._metrics if pair[0] <= step), self._window)
        for watched in self._watched.values():
            watched.values = deque((pair for pair in watched.values if pair[0] <= step), self._window)
            watched.evidence = [pair for pair in watched.evidence if pair[0] <= step]
            watched.fired = watched.fired and bool(watched.evidence)

    def _judge(self, name: str, guard: Guard, step: int, metric: str, value: float | None) -> GuardFinding | None:
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
        reason = f"{metric} was {value:.4g} at {steps}, {'below' if guard.falls else 'above'} {bound:.4g}, {why}"
        return GuardFinding(name, guard.action, metric, value, bound, since, step, reason)


def _bound(guard: Guard, before: list[float], window: int) -> tuple[float, str]:
    """Return the stricter of the absolute and the relative bound, with its explanation; infinity if neither exists yet.

    The relative bound is `max(|ratio - 1| * |median|, guard.least)` away from the median, so a negative median works,
    too.
    """
    sign = -1.0 if guard.falls else 1.0
    bounds = [] if guard.limit is None else [(guard.limit, "the guard's limit")]
    if guard.ratio is not None and len(before) >= window // 2:
        middle = median(before)
        distance = max(abs(guard.ratio - 1.0) * abs(middle), guard.least)
        bounds.append(
            (middle + sign * distance, f"since the median of the {len(before)} steps before was {middle:.4g}")
        )
    return min(bounds, key=lambda bound: sign * bound[0], default=(sign * math.inf, ""))
