# SPDX-License-Identifier: Apache-2.0
"""Both policies keep the contract, and size a simulated rollout."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st
from pydantic import ValidationError
from relax_plugin_scaling.balance import Balance, BalanceOptions
from relax_plugin_scaling.target_utilization import TargetUtilization, TargetUtilizationOptions

from relax_core.api import ScalingPolicy, Signals
from relax_core.api.scaling_limits import ScalingLimits
from relax_core.testing.scaling_policy import BUSY, EVEN, IDLE, ScalingPolicySuite
from relax_core.testing.simulated_pool import SimulatedPool, reversals, simulate

LIMITS = ScalingLimits(max_engines=12)


class TestTargetUtilization(ScalingPolicySuite):
    component = "target-utilization"


class TestBalance(ScalingPolicySuite):
    component = "balance"


def targets(policy: ScalingPolicy, *loads: Signals) -> list[int | None]:
    """Return the target after each window of 10 s; None: no proposal."""
    state, found = policy.start(), []
    for number, load in enumerate(loads):
        state, proposal = policy.decide(state, replace(load, at=10.0 * number), 10.0 * number)
        found.append(proposal.target if proposal else None)
    return found


pools = {
    "engines": st.integers(1, 8), "slots": st.integers(2, 6), "request_s": st.floats(8.0, 40.0),
    "groups_per_step": st.integers(2, 6), "max_staleness": st.integers(0, 3), "start_s": st.floats(0.0, 60.0),
}  # fmt: skip


@settings(deadline=None, max_examples=12)
@given(st.builds(SimulatedPool, train_s=st.floats(4.0, 200.0), **pools))
def test_balance_never_oscillates(pool: SimulatedPool) -> None:
    assert reversals(simulate(Balance(), LIMITS, pool, 120)) <= 1


@settings(deadline=None, max_examples=12)
@given(st.builds(SimulatedPool, train_s=st.floats(4.0, 80.0), **pools))
def test_utilization_never_oscillates_if_the_pauses_of_the_load_are_shorter_than_its_hold(pool: SimulatedPool) -> None:
    assert reversals(simulate(TargetUtilization(), LIMITS, pool, 120)) <= 1


def test_balance_grows_until_the_trainer_does_not_wait() -> None:
    """Two engines of four slots finish 32 requests of 20 s in 80 s; the trainer needs 30 s."""
    pool = SimulatedPool(engines=2, train_s=30.0)
    windows = simulate(Balance(), LIMITS, pool, 120)
    before = windows[12].signals
    assert before.trainer_wait > 0.4 and before.busy > 0.9
    assert windows[-1].signals.size > 5
    assert sum(window.signals.trainer_wait for window in windows[-30:]) / 30 <= 0.1


def test_balance_shrinks_to_the_engines_that_the_trainer_needs() -> None:
    """The trainer needs 160 s for rows that one engine makes in 160 s; ten engines are mostly idle."""
    pool = SimulatedPool(engines=10, train_s=160.0)
    windows = simulate(Balance(), LIMITS, pool, 600)
    assert 2 <= windows[-1].signals.size <= 3
    assert pool.steps >= 0.95 * 6000 / 160  # as many steps as with ten engines
    assert sum(window.signals.trainer_wait for window in windows[-60:]) / 60 <= 0.1


def test_balance_adds_no_engine_if_the_trainer_waits_for_other_things() -> None:
    slow = replace(BUSY, busy_in_wait=0.3)  # environments, rewards, or the last long samples
    assert targets(Balance(), *[slow] * 60) == [None] * 60


def test_balance_sees_busy_engines_in_steps_shorter_than_a_window() -> None:
    """On-policy, the engines rest while the trainer works; while it waits all of them are busy."""
    short = replace(BUSY, busy=0.5, trainer_wait=0.5, steps=12)
    assert targets(Balance(), *[short] * 3) == [None] * 2 + [8]
    assert targets(Balance(), *[replace(short, busy_in_wait=None)] * 12) == [None] * 12


def test_balance_averages_over_steps_longer_than_a_window() -> None:
    """A step of 60 s: the trainer waits for 10 s. The average of whole steps decides, not the window of the wait."""
    waits = replace(BUSY, trainer_wait=1.0, steps=0)
    trains = replace(EVEN, trainer_wait=0.0, steps=0)
    step = [waits, *[trains] * 4, replace(trains, steps=1)]
    wanted = [found for found in targets(Balance(), *step * 8) if found]
    assert set(wanted) == {5}  # 4 engines / (1 - 1 / 6), rounded up
    assert targets(Balance(), *step * 3) == [None] * 18  # fewer than four steps


def test_a_trainer_that_only_waits_makes_the_pool_grow_by_a_bounded_factor() -> None:
    assert max(found or 0 for found in targets(Balance(), *[replace(BUSY, trainer_wait=1.0)] * 12)) == 40


def test_utilization_must_hold_without_a_break() -> None:
    assert targets(TargetUtilization(), *[BUSY] * 5) == [None, None, None, 10, 10]
    assert targets(TargetUtilization(), BUSY, BUSY, EVEN, BUSY, BUSY, BUSY, BUSY) == [None] * 6 + [10]
    assert targets(TargetUtilization(), BUSY, BUSY, replace(BUSY, slot_use=None, kv_use=None), BUSY, BUSY) == [None] * 5
    assert targets(TargetUtilization(), *[IDLE] * 14) == [None] * 12 + [1, 1]
    assert targets(TargetUtilization(), *[EVEN] * 60) == [None] * 60


@pytest.mark.parametrize(
    ("load", "target"),
    [
        (replace(EVEN, kv_use=0.9, waiting=0.0), 6),  # 4 * 0.9 / 0.6
        (replace(EVEN, waiting=45.0), 5),  # 45 requests for 4 engines of 10
        (replace(EVEN, waiting=90.0), 9),
        (replace(EVEN, oldest_wait_s=31.0), 5),
        (replace(EVEN, waiting=40.0, oldest_wait_s=30.0), None),
        (replace(IDLE, slot_use=0.2, kv_use=0.25), 2),  # 4 * 0.25 / 0.6
        (replace(IDLE, waiting=1.0), None),
        (replace(IDLE, waiting=None), None),
        (replace(IDLE, serving=1), None),
    ],
)
def test_each_signal_has_its_own_bound(load: Signals, target: int | None) -> None:
    assert targets(TargetUtilization(), *[load] * 20)[-1] == target


def test_bounds_that_would_oscillate_are_refused() -> None:
    with pytest.raises(ValidationError, match=r"low = 0.7, target = 0.6.*choose low < target < high"):
        TargetUtilizationOptions(low=0.7)
    with pytest.raises(ValidationError, match=r"target = 0.9, busy = 0.8.*choose target < busy"):
        BalanceOptions(target=0.9)
