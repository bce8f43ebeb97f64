# SPDX-License-Identifier: Apache-2.0
"""A limited policy keeps its limits under any policy and any signals."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, strategies as st
from relax_plugin_scaling.limits import LimitedPolicy

from relax_core.api import PluginError, Proposal, ScalingPolicy, Signals
from relax_core.api.events import ScalingProposed
from relax_core.api.scaling_limits import ScalingLimits

LIMITS = ScalingLimits(max_engines=8, out_cooldown_s=60.0, in_cooldown_s=300.0)


class Wants(ScalingPolicy):
    """Proposes the numbers in order; its state counts the windows since its last start."""

    def __init__(self, *targets: int | None) -> None:
        self.targets = targets

    def start(self):
        return 0

    def decide(self, state, signals, now):
        target = self.targets[state % len(self.targets)]
        return state + 1, None if target is None else Proposal(target, f"window {state}")


def window(at: float, serving: int | None = 2, starting: int | None = 0, leaving: int | None = 0) -> Signals:
    return Signals(at=at, serving=serving, starting=starting, leaving=leaving)


@dataclass
class Watched:
    """A limited policy and its state."""

    limited: LimitedPolicy
    decisions: list[ScalingProposed | None] = field(default_factory=list)

    def __post_init__(self):
        self.state = self.limited.start()

    def see(self, signals: Signals, now: float | None = None) -> ScalingProposed | None:
        self.state, decision = self.limited.decide(self.state, signals, signals.at if now is None else now)
        return decision


def watch(*targets: int | None, min_engines: int = 1, **limits) -> Watched:
    return Watched(LimitedPolicy(Wants(*targets), LIMITS.model_copy(update=limits), min_engines))


signals = st.builds(
    window, at=st.integers(-20, 60).map(float), serving=st.none() | st.integers(0, 12),
    starting=st.none() | st.sampled_from([0, 0, 0, 0, 1]), leaving=st.none() | st.sampled_from([0, 0, 0, 0, 1]),
)  # fmt: skip
limits = st.builds(
    ScalingLimits, max_engines=st.integers(4, 9),
    out_cooldown_s=st.sampled_from([0.0, 20.0, 60.0]), in_cooldown_s=st.sampled_from([0.0, 50.0]),
    max_joining=st.integers(1, 4), max_leaving=st.integers(1, 4),
)  # fmt: skip


@given(limits, st.integers(1, 4), st.lists(st.none() | st.integers(1, 20), min_size=1), st.lists(signals, max_size=60))
def test_any_policy_is_kept_within_the_limits(
    limits: ScalingLimits, least: int, targets, steps: Iterable[Signals]
) -> None:
    """`at` of each drawn window is the time since the one before."""
    watched, now, changed_at = Watched(LimitedPolicy(Wants(*targets), limits, least)), 0.0, None
    for step in steps:
        now = max(0.0, now + step.at)
        seen = replace(step, at=now)
        before = watched.state
        decision = watched.see(seen)
        assert watched.limited.decide(before, seen, now) == (watched.state, decision)
        if decision is None or decision.target is None:
            continue
        size, target = decision.size, decision.target
        assert least <= target <= limits.max_engines
        assert (target - size) * (decision.wanted - size) > 0
        assert abs(target - size) <= abs(decision.wanted - size)
        assert -limits.max_leaving <= target - size <= limits.max_joining
        assert size == step.serving and step.starting == 0 and step.leaving == 0
        cooldown_s = limits.out_cooldown_s if target > size else limits.in_cooldown_s
        assert changed_at is None or now - changed_at >= cooldown_s
        changed_at = now


def test_a_pool_grows_and_shrinks_after_its_cool_downs() -> None:
    watched = watch(4)
    held = [watched.see(window(10.0 * number)) for number in range(8)]
    assert [decision and decision.target for decision in held] == [None, *[None] * 5, 4, None]
    assert held[5].held_by == "out_cooldown_s = 60" and held[5].reason == "window 4"

    shrinking = watch(1)
    held = [shrinking.see(window(10.0 * number)) for number in range(32)]
    assert [number for number, decision in enumerate(held) if decision and decision.target] == [30]
    assert held[29].held_by == held[31].held_by == "in_cooldown_s = 300"


@pytest.mark.parametrize(
    ("wanted", "size", "limits", "target", "held_by"),
    [
        (20, 2, {}, 6, "max_joining = 4"),
        (20, 6, {}, 8, "max_engines = 8"),
        (20, 8, {}, None, "max_engines = 8"),
        (9, 10, {}, 8, "max_engines = 8"),
        (12, 10, {}, None, "max_engines = 8"),
        (1, 5, {}, 4, "max_leaving = 1"),
        (1, 3, {"min_engines": 3}, None, "min_engines = 3"),
        (1, 5, {"max_leaving": 4, "min_engines": 3}, 3, "min_engines = 3"),
        (3, 1, {"min_engines": 2}, 3, ""),
    ],
)
def test_a_limit_cuts_a_proposal_and_is_named(wanted, size, limits, target, held_by) -> None:
    watched = watch(wanted, in_cooldown_s=0.0, out_cooldown_s=0.0, **limits)
    assert watched.see(window(0.0, size)) is None
    decision = watched.see(window(10.0, size))
    assert (decision.size, decision.wanted, decision.target, decision.held_by) == (size, wanted, target, held_by)


@pytest.mark.parametrize(
    "bad",
    [window(20.0, serving=None), window(20.0, starting=None), window(20.0, leaving=None), window(20.0, serving=0)],
)
def test_a_window_without_engine_counts_decides_nothing_and_restarts_the_policy(bad: Signals) -> None:
    watched = watch(None, None, 4, out_cooldown_s=0.0)
    assert [watched.see(window(0.0)), watched.see(window(10.0)), watched.see(bad)] == [None] * 3
    assert [watched.see(window(30.0)), watched.see(window(40.0))] == [None] * 2  # the policy counts from 0 again
    assert watched.see(window(50.0)).target == 4


def test_old_late_and_repeated_windows_decide_nothing() -> None:
    watched = watch(None, 4, out_cooldown_s=0.0)
    watched.see(window(0.0))
    assert watched.see(window(10.0)) is None
    assert watched.see(window(10.0), now=12.0) is None  # the same window again
    assert watched.see(window(20.0), now=51.0) is None  # measured too long ago
    assert watched.see(window(60.0), now=55.0) is None  # measured in the future
    assert watched.see(window(70.0)) is None  # after a gap the policy starts anew
    assert watched.see(window(80.0)).target == 4


def test_a_policy_starts_anew_after_windows_that_are_missing() -> None:
    watched = watch(None, 4, out_cooldown_s=0.0, max_gap_s=30.0)
    assert [watched.see(window(at)) for at in (0.0, 10.0)] == [None, None]
    assert watched.see(window(40.0)).target == 4  # just within the gap
    again = watch(None, 4, out_cooldown_s=0.0, max_gap_s=30.0)
    assert [again.see(window(at)) for at in (0.0, 10.0, 41.0)] == [None] * 3
    assert again.see(window(51.0)).target == 4


@pytest.mark.parametrize(("moving", "size"), [({"starting": 1}, 3), ({"leaving": 1}, 2)])
def test_no_second_change_begins_while_engines_join_or_leave(moving, size) -> None:
    watched = watch(4, out_cooldown_s=20.0)
    watched.see(window(0.0))
    assert watched.see(window(20.0)).target == 4
    assert [watched.see(window(20.0 + 10.0 * number, **moving)) for number in range(1, 9)] == [None] * 8
    held = watched.see(window(110.0, size))
    assert held.held_by == "out_cooldown_s = 20"  # counted from the end of the change
    assert watched.see(window(120.0, size)).target == 4


def test_a_change_by_a_person_begins_a_cool_down() -> None:
    watched = watch(6, out_cooldown_s=20.0)
    for at in (0.0, 10.0):
        watched.see(window(at))
    assert watched.see(window(20.0, serving=3)) is None
    assert watched.see(window(30.0, serving=3)).held_by == "out_cooldown_s = 20"
    assert watched.see(window(40.0, serving=3)).target == 6


@pytest.mark.parametrize(
    "wrong", [3, Proposal(0, "none"), Proposal(True, "yes"), Proposal(2.5, "half"), Proposal(2, None)]
)
def test_an_invalid_proposal_names_the_policy_and_the_fix(wrong) -> None:
    class Wrong(Wants):
        def decide(self, state, signals, now):
            return state, wrong

    watched = Watched(LimitedPolicy(Wrong(), LIMITS))
    watched.see(window(0.0))
    with pytest.raises(PluginError, match=r"Wrong.*decide\(\) proposed .*want None, or a Proposal"):
        watched.see(window(10.0))
