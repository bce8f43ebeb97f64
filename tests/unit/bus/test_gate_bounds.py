# SPDX-License-Identifier: Apache-2.0
"""The numbers of the staleness rule at its bounds: before, at and after the last step that may train a group."""

from __future__ import annotations

import pytest

from relax_core.bus import gate

RULE = gate.Rule(max_staleness=1, groups_per_step=4)


@pytest.mark.parametrize(
    ("last", "claimed", "slots"),
    [(3, 0, 0), (4, 0, 0), (4, 3, 0), (5, 0, 4), (5, 3, 1), (5, 4, 0), (6, 0, 8), (6, 3, 5), (7, 1, 11)],
)
def test_the_places_of_a_step_are_counted_from_its_claims_and_a_past_step_has_none(
    last: int, claimed: int, slots: int
) -> None:
    assert gate.slots_through(RULE, 5, claimed, last) == slots


@pytest.mark.parametrize(
    ("claimed", "unclaimed", "over"),
    [
        (0, {}, 0), (0, {5: 4}, 0), (0, {5: 5}, 1), (1, {5: 4}, 1), (0, {6: 8}, 0), (0, {6: 9}, 1), (3, {5: 1, 6: 4}, 0),
        (3, {5: 2, 6: 1}, 1), (0, {4: 2}, 2), (2, {4: 1, 5: 2, 6: 4}, 1), (0, {5: 1, 6: 9}, 2), (0, {6: 4, 5: 5}, 1),
    ],
)  # fmt: skip
def test_groups_beyond_the_places_before_their_last_step_overflow(
    claimed: int, unclaimed: dict[int, int], over: int
) -> None:
    assert gate.overflow(RULE, 5, claimed, unclaimed) == over


@pytest.mark.parametrize(
    ("claimed", "unclaimed", "allowed", "ended"),
    [
        (0, [(4, True, 1)], 1, (1,)), (0, [(5, True, n) for n in range(5)], 0, (4,)),
        (0, [(5, True, n) for n in range(5)], 1, ()), (1, [(5, n > 0, n) for n in range(4)], 0, (0,)),
        (4, [(6, True, n) for n in range(4)], 0, ()), (4, [(5, False, 1), (6, True, 2)], 0, (1,)),
    ],
)  # fmt: skip
def test_a_late_step_ends_as_few_groups_as_its_places_demand(
    claimed: int, unclaimed: list[tuple[int, bool, int]], allowed: int, ended: tuple[int, ...]
) -> None:
    assert gate.victims(RULE, 5, claimed, unclaimed, allowed) == ended


def test_a_full_step_claims_no_group_and_one_place_is_enough() -> None:
    assert [gate.may_train(RULE, 5, claimed, 4) for claimed in (3, 4)] == [True, False]
    assert [gate.may_train(RULE, 5, 0, floor) for floor in (3, 4, 5, 6)] == [False, True, True, False]
    assert [gate.may_grant(RULE, 5, 5, live) for live in (7, 8)] == [True, False]
    assert [gate.capacity(gate.Rule(1, 4, 2), 5, engine) for engine in (6, 5, 4, 3)] == [10, 10, 6, 0]
    assert [gate.may_claim(gate.Rule(1, 4, spare), 5, 3, {5: 2}, 4) for spare in (0, 1)] == [False, True]
