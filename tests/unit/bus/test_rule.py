# SPDX-License-Identifier: Apache-2.0
"""The staleness rule, explored whole in small worlds: every schedule of grants, late publishes, drops and rollbacks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from relax_core.bus import gate
from relax_core.bus.gate import may_grant, may_train
from tests.unit.bus import rule_model as model

SMALL = [  # max_staleness, groups_per_step, spare_groups, steps without checkpoint
    (0, 1, 0, 1),
    (0, 2, 0, 1),
    (0, 2, 1, 1),
    (1, 1, 0, 1),
    (1, 1, 0, 2),
    (1, 1, 1, 1),
    (1, 2, 0, 0),
    (2, 1, 0, 0),
]
LARGE = [(3, 1, 0, 0), (1, 2, 0, 1), (2, 1, 0, 1), (2, 1, 0, 2), (1, 2, 1, 0), (2, 2, 0, 0), (3, 1, 0, 1), (1, 2, 0, 2)]


def limits(k: int, groups: int, spare: int, uncovered: int) -> model.Limits:
    return model.Limits(gate.Rule(k, groups, spare), uncovered=uncovered)


@pytest.mark.parametrize("case", SMALL)
def test_rule_keeps_lag_bounded_and_every_step_can_finish(case):
    assert model.explore(limits(*case)) > 20


CARRIED = [(0, 1, 0, 1), (1, 1, 0, 0), (1, 1, 0, 1)]


@pytest.mark.parametrize("case", CARRIED)
def test_rule_holds_where_engines_let_go_of_groups_and_others_continue_with_them(case):
    assert model.explore(replace(limits(*case), carries=True), most=12_000) > 20


@pytest.mark.faults
@pytest.mark.parametrize("case", [(1, 2, 0, 0), (1, 2, 0, 1), (2, 1, 0, 0), (2, 1, 0, 1), (2, 2, 0, 0), (3, 1, 0, 1)])
def test_rule_holds_for_carried_groups_in_larger_worlds(case):
    assert model.explore(replace(limits(*case), carries=True), most=400_000) > 1000


@pytest.mark.faults
@pytest.mark.parametrize("case", LARGE)
def test_rule_holds_in_larger_worlds(case):
    # The largest are cut off: nearest worlds first, so what is left out is what takes the longest schedules.
    assert model.explore(limits(*case), most=400_000) > 1000


BROKEN = {
    "may_claim": lambda rule, version, claimed, due, floor: may_train(rule, version, claimed, floor),
    "may_grant": lambda rule, version, engine, live: may_grant(rule, version, engine, live - 1),
    "victims": lambda rule, version, claimed, unclaimed, spare: (),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_rule_is_refuted(monkeypatch, name):
    """Claims by age alone, one grant too many, and a late step that ends nothing."""
    monkeypatch.setattr(gate, name, BROKEN[name])
    with pytest.raises(AssertionError):
        model.explore(limits(2, 1, 0, 0))


@pytest.mark.parametrize("k", [0, 1, 3])
def test_capacity_shrinks_by_one_step_for_each_version_an_engine_lags(k):
    rule = gate.Rule(k, 4)
    assert [gate.capacity(rule, 10, 10 - lag) for lag in range(k + 3)] == [
        max(0, (k + 1 - lag) * 4) for lag in range(k + 3)
    ]


def test_unbounded_staleness_grants_and_claims_anything():
    rule = gate.Rule(None, 2)
    assert gate.may_grant(rule, 100, 0, 10**6)
    assert gate.may_claim(rule, 100, 0, {}, 0)
    assert not gate.may_claim(rule, 100, 2, {}, 0), "the step is full"


def test_a_group_that_others_must_precede_waits():
    rule = gate.Rule(1, 2)
    assert not gate.may_claim(rule, 5, 0, {5: 2, 6: 1}, floor=5), "two groups expire now and need both places"
    assert gate.may_claim(rule, 5, 0, {5: 1, 6: 1}, floor=5)
    assert gate.may_claim(rule, 5, 0, {5: 2, 6: 1}, floor=4)


def test_an_expired_group_and_one_from_the_future_are_never_claimed():
    rule = gate.Rule(1, 2)
    assert not gate.may_train(rule, 5, 0, floor=3)
    assert not gate.may_train(rule, 5, 0, floor=6)


def test_unready_groups_end_first_and_as_few_as_possible():
    rule = gate.Rule(1, 2)
    unclaimed = [(5, True, 1), (5, False, 2), (6, True, 3), (6, True, 4), (6, False, 5)]
    assert gate.victims(rule, 5, 0, unclaimed, 0) == (2,)
    assert gate.victims(rule, 6, 0, unclaimed, 0) == (2, 1, 5)
    assert gate.victims(rule, 5, 0, unclaimed, 1) == ()


def test_no_group_is_granted_beyond_the_last_step() -> None:
    rule = gate.Rule(2, 4, steps=10)
    assert gate.capacity(rule, 5, 5) == 12
    assert gate.capacity(rule, 9, 9) == 4
    assert not gate.may_grant(rule, 10, 10, 0)
    assert gate.capacity(gate.Rule(None, 4, steps=10), 9, 0) == 4
