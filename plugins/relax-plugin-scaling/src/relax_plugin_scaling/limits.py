# SPDX-License-Identifier: Apache-2.0
"""A scaling policy within limits: a state machine that limits proposals, and hides incomplete windows from the policy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

from relax_core.api import PluginError, Proposal, ScalingLimits, ScalingPolicy, Signals
from relax_core.api.events import ScalingProposed

POOL = "rollout"
"""The pool of the policy's engines."""
MAX_GAP_S = 30.0
"""Longest time between two windows, in seconds: the length of three windows. After a longer time the policy starts anew."""


@dataclass(frozen=True, slots=True)
class LimitedState:
    """The state of a limited policy."""

    policy: Any
    """State of the policy within the limits."""
    at: float | None = None
    """End of the newest window; None: no window yet."""
    size: int | None = None
    """Size of the pool in the newest window."""
    changed_at: float | None = None
    """Time of the last change of the pool, or of its first window; None: no window yet."""


class LimitedPolicy:
    """One scaling policy within limits: `(state, signals, now) -> (state, proposal)`.

    Invariants:
    - A target is between `min_engines` and `max_engines`, and in the direction of the proposal.
    - No target follows from signals that are incomplete, repeated or too old, or while an engine starts or leaves.
    - The policy starts anew after a gap in the signals, and while an engine starts or leaves. So its conditions hold
      over windows of one pool without gaps.
    - Two targets are separated by the cool-down of the later one's direction. A change by a person counts too.
    """

    def __init__(self, policy: ScalingPolicy, limits: ScalingLimits, min_engines: int = 1) -> None:
        """`min_engines`: number of the oldest engines, which never leave."""
        self.policy, self.limits, self.min_engines = policy, limits, min_engines

    def start(self) -> LimitedState:
        """Return the state before the first window."""
        return LimitedState(self.policy.start())

    def decide(self, state: LimitedState, signals: Signals, now: float) -> tuple[LimitedState, ScalingProposed | None]:
        """Pass one window to the policy; return the next state, and the policy's proposal within the limits, if any."""
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
        limited = self._limited(state, size, proposal, now)
        if limited.target is not None:
            state = replace(state, changed_at=now)
        return state, limited

    def _checked(self, proposal: Any) -> Proposal:
        """Return a valid proposal. Raises PluginError for another type or a number below 1."""
        typed = isinstance(proposal, Proposal) and type(proposal.target) is int and isinstance(proposal.reason, str)
        if typed and proposal.target >= 1:
            return cast(Proposal, proposal)
        fix = "want None, or a Proposal with a target of at least 1 and a reason"
        raise PluginError(type(self.policy).__name__, f"decide() proposed {repr(proposal)[:200]}; {fix}")

    def _limited(self, state: LimitedState, size: int, proposal: Proposal, now: float) -> ScalingProposed:
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
        return ScalingProposed(POOL, size, wanted, target if changes else None, proposal.reason, held_by)
