# SPDX-License-Identifier: Apache-2.0
"""The staleness rule, explored whole in small worlds: every schedule of grants, late publishes, drops and rollbacks."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from relax_core.bus import gate

sys.path.insert(0, str(Path(__file__).parent))
import rule_model as model  # noqa: E402

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


CARRIED = [(0, 1, 0, 1), (1, 1, 0, 0), (1, 1, 0, 1), (2, 1, 0, 0)]


@pytest.mark.parametrize("case", CARRIED)
def test_rule_holds_where_engines_let_go_of_groups_and_others_go_on_with_them(case):
    assert model.explore(replace(limits(*case), carries=True), most=12_000) > 20


@pytest.mark.faults
@pytest.mark.parametrize("case", [(1, 2, 0, 0), (1, 2, 0, 1), (2, 1, 0, 1), (2, 2, 0, 0), (3, 1, 0, 0), (3, 1, 0, 1)])
def test_rule_holds_for_carried_groups_in_larger_worlds(case):
    assert model.explore(replace(limits(*case), carries=True), most=400_000) > 1000


def test_going_on_at_an_engine_below_the_groups_floor_is_refuted(monkeypatch):
    monkeypatch.setattr(model, "may_continue", lambda engine, floor: True)
    with pytest.raises(AssertionError, match="can't (all be trained in time|finish)"):
        model.explore(replace(limits(1, 1, 0, 0), carries=True))


@pytest.mark.faults
@pytest.mark.parametrize("case", LARGE)
def test_rule_holds_in_larger_worlds(case):
    # The largest are cut off: nearest worlds first, so what is left out is what takes the longest schedules.
    assert model.explore(limits(*case), most=400_000) > 1000


def test_claims_by_earliest_expiry_alone_are_refuted(monkeypatch):
    monkeypatch.setattr(
        gate, "may_claim", lambda rule, version, claimed, due, floor: gate.may_train(rule, version, claimed, floor)
    )
    with pytest.raises(AssertionError, match="can't all be trained in time"):
        model.explore(limits(1, 1, 0, 0))


def test_a_grant_that_ignores_the_engines_version_is_refuted(monkeypatch):
    real = gate.may_grant
    monkeypatch.setattr(gate, "may_grant", lambda rule, version, engine, live: real(rule, version, version, live))
    with pytest.raises(AssertionError):
        model.explore(limits(1, 1, 0, 0))


def test_a_grant_of_one_group_too_many_is_refuted(monkeypatch):
    real = gate.may_grant
    monkeypatch.setattr(gate, "may_grant", lambda rule, version, engine, live: real(rule, version, engine, live - 1))
    with pytest.raises(AssertionError):
        model.explore(limits(2, 1, 0, 0))


def test_a_rollback_that_keeps_tokens_of_given_up_weights_is_refuted(monkeypatch):
    real = model.rolled_back

    def keeps_all(world, bounds):
        return real(world, bounds) if world.checkpoint == 0 else _shifted(world, bounds)

    def _shifted(world, bounds):
        groups = (g._replace(floor=g.floor + 1, newest=g.newest + 1) for g in world.groups if g.where == model.READY)
        return model.World(tuple(sorted(groups)), (None,) * bounds.engines)

    monkeypatch.setattr(model, "rolled_back", keeps_all)
    with pytest.raises(AssertionError):
        model.explore(limits(1, 1, 0, 1))


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


def test_nothing_is_granted_that_no_step_is_left_for() -> None:
    rule = gate.Rule(2, 4, steps=10)
    assert gate.capacity(rule, 5, 5) == 12
    assert gate.capacity(rule, 9, 9) == 4
    assert not gate.may_grant(rule, 10, 10, 0)
    assert gate.capacity(gate.Rule(None, 4, steps=10), 9, 0) == 4
