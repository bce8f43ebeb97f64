# SPDX-License-Identifier: Apache-2.0
"""A policy that keeps the use of the engines' slots and caches in a band."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from relax_core.api import Options, Proposal, ScalingPolicy, Signals

ROUNDING = 1e-9
"""Error of a quotient that must not add an engine."""
MOST_WAITING = 1.0
"""Mean number of waiting requests below which a queue counts as empty."""


class TargetUtilizationOptions(Options):
    target: float = Field(0.6, gt=0.0, lt=1.0)
    """Use to which the pool is sized: the larger of the used shares of request slots and of KV caches."""
    high: float = Field(0.85, gt=0.0, le=1.0)
    """Use above which engines join."""
    low: float = Field(0.3, ge=0.0, lt=1.0)
    """Use below which engines leave, if no request waits."""
    waiting_per_engine: PositiveFloat = 10.0
    """Waiting requests per engine above which engines join."""
    oldest_wait_s: PositiveFloat = 30.0
    """Seconds that a request may wait for an engine; after a longer wait, engines join."""
    out_hold_s: NonNegativeFloat = 30.0
    """Seconds for which a reason to grow must hold without a break."""
    in_hold_s: NonNegativeFloat = 120.0
    """Seconds for which the reasons to shrink must hold without a break."""

    @model_validator(mode="after")
    def _bounds_are_in_order(self) -> Self:
        if not self.low < self.target < self.high:
            got = f"low = {self.low:g}, target = {self.target:g}, high = {self.high:g}"
            raise ValueError(f"got {got}; choose low < target < high, so that a change does not cause the next")
        return self


@dataclass(frozen=True, slots=True)
class Conditions:
    """Times since which a reason to grow, and the reasons to shrink, hold; None: not now."""

    out_since: float | None = None
    in_since: float | None = None


class TargetUtilization(ScalingPolicy[TargetUtilizationOptions]):
    """Grows if engines are full or requests queue; shrinks if engines are idle.

    Engines leave only if the use of the others stays at or below `target`, which is below `high`. So a constant load
    cannot make the pool grow and shrink in turns.
    """

    def start(self) -> Conditions:
        return Conditions()

    def decide(self, state: Conditions, signals: Signals, now: float) -> tuple[Conditions, Proposal | None]:
        options, size, use = self.options, signals.size, signals.use
        if size is None or use is None:
            return Conditions(), None
        reason = self._reason_to_grow(signals, size, use)
        empty = signals.waiting is not None and signals.waiting < MOST_WAITING
        out_since = _since(state.out_since, bool(reason), now)
        in_since = _since(state.in_since, not reason and empty and use < options.low, now)
        state = Conditions(out_since, in_since)
        fitting = ceil(size * use / options.target - ROUNDING)
        if out_since is not None and now - out_since >= options.out_hold_s:
            queue = ceil((signals.waiting or 0.0) / options.waiting_per_engine - ROUNDING)
            return state, Proposal(max(size + 1, fitting, queue), f"{reason} for {now - out_since:.0f} s")
        if in_since is not None and now - in_since >= options.in_hold_s and max(fitting, 1) < size:
            reason = f"use {use:.2f} is below low = {options.low:g} for {now - in_since:.0f} s, and no request waits"
            return state, Proposal(max(fitting, 1), reason)
        return state, None

    def _reason_to_grow(self, signals: Signals, size: int, use: float) -> str:
        """Return a clause with the first signal above its bound; empty: none."""
        options, waiting, oldest_s = self.options, signals.waiting, signals.oldest_wait_s
        if use > options.high:
            return f"use {use:.2f} is above high = {options.high:g}"
        if waiting is not None and waiting > options.waiting_per_engine * size:
            bound = f"waiting_per_engine = {options.waiting_per_engine:g}"
            return f"{waiting / size:.1f} waiting requests per engine are above {bound}"
        if oldest_s is not None and oldest_s > options.oldest_wait_s:
            return f"a request waited {oldest_s:.0f} s, above oldest_wait_s = {options.oldest_wait_s:g}"
        return ""


def _since(since: float | None, holds: bool, now: float) -> float | None:
    if not holds:
        return None
    return now if since is None else since
