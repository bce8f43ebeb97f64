# SPDX-License-Identifier: Apache-2.0
"""A scaling policy within limits: a state machine that limits proposals, and passes no bad data to the policy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

from relax_core.api.errors import PluginError
from relax_core.api.scaling import Proposal, ScalingPolicy, Signals
from relax_core.config.run_config import AutoscaleKeys
from relax_core.observe.signals import WINDOW_S
from relax_core.registry.shapes import shown

MAX_GAP_S = 3 * WINDOW_S
"""Longest time between two windows, in seconds; after a longer time the policy starts anew."""


@dataclass(frozen=True, slots=True)
class LimitedState:
    """The state of a limited policy and of the policy within."""

    policy: Any
    at: float | None = None
    """End of the newest window; None: no window yet."""
    size: int | None = None
    """Size of the pool in the newest window."""
    changed_at: float | None = None
    """Time of the last change of the pool, or of its first window; None: no window yet."""


@dataclass(frozen=True, slots=True)
class ScalingDecision:
    """A policy's proposal, and its result within the limits."""

    size: int
    """Size of the pool when the policy decided."""
    wanted: int
    """Number of engines that the policy proposed."""
    target: int | None
    """Number of engines that the pool should have now; None: no change."""
    reason: str
    """The policy's reason."""
    held_by: str = ""
    """Limit that reduced or stopped the proposal; empty: none."""


class LimitedPolicy:
    """One scaling policy within limits: `(state, signals, now) -> (state, decision)`.

    Invariants:
    - A target is between `min_engines` and `max_engines`, and in the direction of the proposal.
    - No target follows from signals that are incomplete, repeated or too old, or while an engine starts or leaves.
    - The policy starts anew after a gap in the signals, and while an engine starts or leaves. So its conditions hold
      over windows of one pool without gaps.
    - Two targets are separated by the cool-down of the later one's direction. A change by a person counts too.
    """

    def __init__(self, policy: ScalingPolicy, limits: AutoscaleKeys, min_engines: int = 1) -> None:
        """`min_engines`: number of the oldest engines, which never leave."""
        self.policy, self.limits, self.min_engines = policy, limits, min_engines

    def start(self) -> LimitedState:
        """Return the state before the first window."""
        return LimitedState(self.policy.start())

    def decide(self, state: LimitedState, signals: Signals, now: float) -> tuple[LimitedState, ScalingDecision | None]:
        """Pass one window to the policy; return the next state, and the decision on the policy's proposal, if any."""
        size = signals.size
        if state.at == signals.at:
            return state, None  # the same window again
        usable = size is not None and size > 0 and signals.leaving is not None
        if not usable or not 0 <= now - signals.at <= MAX_GAP_S:
            return replace(state, policy=self.policy.start()), None
        if signals.starting or signals.leaving or size != state.size:
            return LimitedState(self.policy.start(), signals.at, size, signals.at), None
        assert size is not None and state.at is not None
        before = state.policy if 0 < signals.at - state.at <= MAX_GAP_S else self.policy.start()
        after, proposal = self.policy.decide(before, signals, now)
        state = replace(state, policy=after, at=signals.at)
        if proposal is None or self._checked(proposal).target == size:
            return state, None
        decision = self._limited(state, size, proposal, now)
        if decision.target is not None:
            state = replace(state, changed_at=now)
        return state, decision

    def _checked(self, proposal: Any) -> Proposal:
        """Return a valid proposal. Raises PluginError for another type or a number below 1."""
        typed = isinstance(proposal, Proposal) and type(proposal.target) is int and isinstance(proposal.reason, str)
        if typed and proposal.target >= 1:
            return cast(Proposal, proposal)
        fix = "want None, or a Proposal with a target of at least 1 and a reason"
        raise PluginError(type(self.policy).__name__, f"decide() proposed {shown(proposal)}; {fix}")

    def _limited(self, state: LimitedState, size: int, proposal: Proposal, now: float) -> ScalingDecision:
        limits, wanted = self.limits, proposal.target
        joins = wanted > size
        cooldown_s = limits.out_cooldown_s if joins else limits.in_cooldown_s
        step, step_key = (limits.max_joining, "max_joining") if joins else (limits.max_leaving, "max_leaving")
        target, held_by = wanted, ""
        if abs(target - size) > step:
            target, held_by = size + (step if joins else -step), f"{step_key} = {step}"
        if target > limits.max_engines:
            target, held_by = limits.max_engines, f"max_engines = {limits.max_engines}"
        elif target < self.min_engines:
            target, held_by = self.min_engines, f"min_engines = {self.min_engines}"
        changes = target > size if joins else target < size
        assert state.changed_at is not None
        if changes and now - state.changed_at < cooldown_s:
            changes = False
            held_by = f"{'out' if joins else 'in'}_cooldown_s = {cooldown_s:g}"
        return ScalingDecision(size, wanted, target if changes else None, proposal.reason, held_by)
