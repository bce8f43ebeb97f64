# SPDX-License-Identifier: Apache-2.0
"""A policy that sizes the rollout to the trainer: the trainer does not wait, and the staleness bound does not bind."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Self

from pydantic import Field, NonNegativeFloat, PositiveInt, model_validator

from relax_core.api import Options, Proposal, ScalingPolicy, Signals

ROUNDING = 1e-9
"""Error of a quotient that must not add an engine."""
MOST_GROWTH = 0.9
"""Largest share of the trainer's waits that counts. A trainer that only waits says nothing about the need."""


class BalanceOptions(Options):
    trainer_wait: float = Field(0.1, gt=0.0, lt=1.0)
    """Share of its time that the trainer may wait for rows. Above this share engines join."""
    staleness_wait: float = Field(0.5, gt=0.0, lt=1.0)
    """Share of the time in which the staleness bound may keep groups from starting. Above this share engines leave."""
    busy: float = Field(0.8, gt=0.0, le=1.0)
    """Engines join only if at least this share of the engines is busy while the trainer waits. If fewer are busy, the
    trainer waits for something else, such as environments or the longest samples."""
    target: float = Field(0.7, gt=0.0, lt=1.0)
    """Most time that the engines that stay may be busy when engines leave, as a share."""
    steps: PositiveInt = 4
    """Least number of steps over which the shares are averaged. The trainer works and waits in turns within a step."""
    average_s: NonNegativeFloat = 30.0
    """Least number of seconds over which the shares are averaged."""

    @model_validator(mode="after")
    def _bounds_are_in_order(self) -> Self:
        if not self.target < self.busy:
            got = f"target = {self.target:g}, busy = {self.busy:g}"
            raise ValueError(f"got {got}; choose target < busy, so that a change does not cause the next")
        return self


@dataclass(frozen=True, slots=True)
class BalanceSums:
    """Sums over the windows since the start of the average. All but `steps` are in seconds."""

    seconds: float = 0.0
    steps: int = 0
    trainer_wait: float = 0.0
    staleness_wait: float = 0.0
    busy: float = 0.0
    busy_in_wait: float = 0.0
    """Busy time of the engines while the trainer waited."""


class Balance(ScalingPolicy[BalanceOptions]):
    """Grows if the trainer waits while the engines are busy; shrinks if the staleness bound holds the rollout back.

    A trainer that waits a share w of its time would use rows at 1 / (1 - w) of the present rate, so that many engines
    are proposed. Engines leave if the trainer does not wait, and the others are busy for at most `target` of the time
    even if they need time in proportion to their requests.
    """

    def start(self) -> BalanceSums:
        return BalanceSums()

    def decide(self, state: BalanceSums, signals: Signals, now: float) -> tuple[BalanceSums, Proposal | None]:
        options, size, busy, steps = self.options, signals.size, signals.busy, signals.steps
        waits, holds, seconds = signals.trainer_wait, signals.staleness_wait, signals.window_s
        in_wait = signals.busy_in_wait
        if size is None or busy is None or steps is None or waits is None or holds is None:
            return BalanceSums(), None
        state = BalanceSums(
            state.seconds + seconds, state.steps + steps, state.trainer_wait + waits * seconds,
            state.staleness_wait + holds * seconds, state.busy + busy * seconds,
            state.busy_in_wait + (busy if in_wait is None else in_wait) * waits * seconds,
        )  # fmt: skip
        if state.steps < options.steps or state.seconds < max(options.average_s, ROUNDING):
            return state, None
        proposal = self._proposal(state, size)
        return (BalanceSums() if proposal is None else state), proposal

    def _proposal(self, sums: BalanceSums, size: int) -> Proposal | None:
        options = self.options
        waits, holds, busy = (one / sums.seconds for one in (sums.trainer_wait, sums.staleness_wait, sums.busy))
        over = f"over {sums.steps} steps in {sums.seconds:.0f} s"
        if waits > options.trainer_wait:
            in_wait = sums.busy_in_wait / sums.trainer_wait
            if in_wait < options.busy:
                return None
            target = max(size + 1, ceil(size / (1 - min(waits, MOST_GROWTH)) - ROUNDING))
            why = f"the trainer waited {waits:.0%} of its time, above trainer_wait = {options.trainer_wait:g}"
            return Proposal(target, f"{why}, with {in_wait:.0%} of the engines busy, {over}")
        target = max(1, ceil(size * busy / options.target - ROUNDING))
        if holds > options.staleness_wait and target < size:
            why = f"the staleness bound held groups back {holds:.0%} of the time"
            return Proposal(target, f"{why}, above staleness_wait = {options.staleness_wait:g}, {over}")
        return None
