# SPDX-License-Identifier: Apache-2.0
"""A simulated run in virtual time, on which scaling policies are tested: a rollout, its engine pool and a trainer."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from itertools import pairwise
from typing import cast

from relax_core.api.errors import PluginError
from relax_core.api.events import Logged, ScalingProposed
from relax_core.api.scaling import Autoscaler, ScalingPolicy, Signals
from relax_core.api.scaling_limits import ScalingLimits
from relax_core.registry.catalogue import Catalogue

TICK_S = 1.0
"""Seconds of one step of the simulation."""
GOLDEN = 0.618
"""Fraction whose multiples spread the durations of requests evenly and in the same way in each simulation."""


@dataclass(slots=True)
class SimulatedPool:
    """A run whose rollout starts groups while the staleness bound and the room of the engines allow.

    Each tick: the rollout starts groups, waiting requests take free slots in order of arrival, running requests go on,
    and the trainer takes a step's groups once they are ready. Requests last between half and one and a half of
    `request_s`.
    """

    engines: int
    slots: int = 4
    """Requests that one engine runs at once."""
    request_s: float = 20.0
    """Mean seconds of a request on an engine."""
    train_s: float = 40.0
    """Seconds that the trainer needs for one step."""
    groups_per_step: int = 8
    group_size: int = 4
    max_staleness: int = 1
    start_s: float = 20.0
    """Seconds until a new engine serves."""
    now: float = 0.0
    steps: int = 0
    """Finished steps of the trainer."""
    starting: list[float] = field(default_factory=list)
    """Times at which new engines will serve."""
    _waiting: deque[tuple[float, int]] = field(default_factory=deque)
    """(time of arrival, group) of each waiting request."""
    _running: list[tuple[float, int]] = field(default_factory=list)
    """(seconds left, group) of each running request."""
    _unfinished: Counter[int] = field(default_factory=Counter)
    """Open requests by group."""
    _ready: int = 0
    _in_training: int = 0
    _training_left_s: float = 0.0
    _requests: int = 0
    _groups: int = 0
    _sums: Counter[str] = field(default_factory=Counter)
    """Sums over the ticks of the window."""

    def scale(self, target: int) -> None:
        """Start or stop engines. The requests of a stopped engine go on elsewhere."""
        size = self.engines + len(self.starting)
        self.starting += [self.now + self.start_s] * (target - size)
        self.engines -= max(0, size - target)

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        for _ in range(int(seconds / TICK_S)):
            self._tick()

    def signals(self) -> Signals:
        """Return the signals of the window since the last call, which ends now."""
        sums, self._sums = self._sums, Counter()
        ticks = sums["ticks"]
        return Signals(
            at=self.now, window_s=ticks * TICK_S, serving=self.engines, starting=len(self.starting), leaving=0,
            running=sums["running"] / ticks, waiting=sums["waiting"] / ticks, oldest_wait_s=sums["oldest_wait_s"],
            busy=sums["busy"] / ticks,
            busy_in_wait=sums["busy_in_wait"] / sums["trainer_wait"] if sums["trainer_wait"] else None,
            slot_use=sums["use"] / ticks, groups_per_s=sums["scored"] / (ticks * TICK_S), steps=sums["steps"],
            trainer_wait=sums["trainer_wait"] / ticks, staleness_wait=sums["staleness_wait"] / ticks,
        )  # fmt: skip

    @property
    def _live(self) -> int:
        """Number of groups that the staleness bound counts."""
        return len(self._unfinished) + self._ready + self._in_training

    def _tick(self) -> None:
        self.engines += sum(at <= self.now for at in self.starting)
        self.starting = [at for at in self.starting if at > self.now]
        capacity = self.engines * self.slots
        bound = (self.max_staleness + 1) * self.groups_per_step
        while (held := self._live >= bound) is False and len(self._waiting) < capacity:
            self._groups += 1
            self._unfinished[self._groups] = self.group_size
            self._waiting += [(self.now, self._groups)] * self.group_size
        while len(self._running) > capacity:
            self._waiting.appendleft((self.now, self._running.pop()[1]))
        while self._waiting and len(self._running) < capacity:
            self._requests += 1
            length = 0.5 + self._requests * GOLDEN % 1
            self._running.append((length * self.request_s, self._waiting.popleft()[1]))
        sums = self._sums
        sums["ticks"] += 1
        sums["running"] += len(self._running)
        sums["waiting"] += len(self._waiting)
        busy = min(1, len(self._running) / self.engines)
        sums["busy"] += busy  # type: ignore[assignment]
        sums["busy_in_wait"] += 0 if self._in_training else busy  # type: ignore[assignment]
        sums["use"] += len(self._running) / capacity  # type: ignore[assignment]
        waited = self.now - self._waiting[0][0] if self._waiting else 0.0
        sums["oldest_wait_s"] = max(sums["oldest_wait_s"], waited)  # type: ignore[assignment]
        sums["staleness_wait"] += held
        self._running = [(left - TICK_S, group) for left, group in self._running]
        for group in [group for left, group in self._running if left <= 0]:
            self._unfinished[group] -= 1
            if not self._unfinished[group]:
                del self._unfinished[group]
                self._ready += 1
                sums["scored"] += 1
        self._running = [(left, group) for left, group in self._running if left > 0]
        self._train()
        self.now += TICK_S

    def _train(self) -> None:
        self._sums["trainer_wait"] += not self._in_training
        if not self._in_training and self._ready >= self.groups_per_step:
            self._ready -= self.groups_per_step
            self._in_training, self._training_left_s = self.groups_per_step, self.train_s
        if not self._in_training:
            return
        self._training_left_s -= TICK_S
        if self._training_left_s <= 0:
            self._in_training, self.steps = 0, self.steps + 1
            self._sums["steps"] += 1


@dataclass(frozen=True, slots=True)
class SimulatedWindow:
    """One window of a simulation, and the proposal after it."""

    signals: Signals
    proposal: ScalingProposed | None


def simulate(
    policy: ScalingPolicy, limits: ScalingLimits, pool: SimulatedPool, windows: int, window_s: float = 10.0
) -> list[SimulatedWindow]:
    """Let a policy within limits scale a simulated pool; return its windows in order. Raises the policy's error."""
    catalogue = Catalogue.load()
    for error in catalogue.lacking("relax_autoscaler", "the limits of a policy", "no plugin"):
        raise error
    made = catalogue.part("relax_autoscaler", policy=policy, limits=limits, min_engines=1)
    autoscaler = cast(Autoscaler, made)
    state, seen = autoscaler.start(), list[SimulatedWindow]()
    for _ in range(windows):
        pool.advance(window_s)
        signals = pool.signals()
        state, event = autoscaler.decide(state, signals, pool.now)
        if isinstance(event, Logged):
            raise PluginError(type(policy).__name__, event.message, event.fields["frames"])
        if event is not None and event.target is not None:
            pool.scale(event.target)
        seen.append(SimulatedWindow(signals, event))
    return seen


def reversals(windows: list[SimulatedWindow]) -> int:
    """Return how often the pool was scaled in the direction opposite to the change before."""
    targets = [(w.proposal.size, w.proposal.target) for w in windows if w.proposal and w.proposal.target is not None]
    joined = [target > size for size, target in targets]
    return sum(before != after for before, after in pairwise(joined))
