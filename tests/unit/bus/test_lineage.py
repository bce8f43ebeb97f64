# SPDX-License-Identifier: Apache-2.0
"""Steps repeat after a rollback: which versions the actor's weights descend from, and what becomes of samples of others."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from relax_core.api.batch import AttemptId, RowId
from relax_core.api.bus import BusSettings, ClaimRequest, Issue, Sealed
from relax_core.api.trajectory import Outcome
from relax_core.api.weights import Version
from relax_core.bus.ledger import Lineage
from relax_core.bus.queue import TransferQueue


@given(st.integers(0, 3), st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=6))
def test_the_lineage_is_what_the_restored_weights_came_from_and_what_was_trained_since(
    first: int, lives: list[tuple[int, int]]
) -> None:
    """Each life trains some steps and is then rolled back by some."""
    lineage, path, ever = Lineage(Version("actor", 0, first)), [(0, first)], {(0, first)}
    for trained, back in lives:
        for _ in range(trained):
            incarnation, step = path[-1]
            path.append((incarnation, step + 1))
            ever.add(path[-1])
        incarnation, step = path[-1]
        restored = max(0, step - back)
        path = [version for version in path if version[1] <= restored]
        path.append((incarnation + 1, restored))
        ever.add(path[-1])
        lineage.rollback(restored, incarnation + 1)
        assert {version for version in ever if lineage.has(*version)} == set(path)
    assert not lineage.has(lineage.incarnation + 1, 0), "weights that no trainer of this run has"


def test_a_resumed_run_accepts_versions_up_to_the_step_that_it_continues_from() -> None:
    lineage = Lineage(Version("actor", 3, 10))
    assert lineage.has(1, 10) and not lineage.has(1, 11)
    lineage.rollback(6, 4)
    assert lineage.has(1, 6) and not lineage.has(1, 7) and not lineage.has(3, 7)


def queue_at(step: int, incarnation: int) -> TransferQueue:
    """A run of two samples a group that was rolled back to this step from the one five later."""
    queue = TransferQueue(BusSettings(2, 1, 8), Version("actor", incarnation - 1, step + 5))
    queue.rollback(step, incarnation)
    return queue


def put(queue: TransferQueue, issue: Issue, *newest: dict[int, int]) -> None:
    """Rows of the first samples of a group, one a sample, by the weights that sampled each."""
    attempts: list[AttemptId] = list(issue.attempts[: len(newest)])
    floor = min(step for told in newest for step in told.values())
    sealed = [
        Sealed(attempt, 1, Outcome.FINISHED, 1.0, floor, 4, newest=told)
        for attempt, told in zip(attempts, newest, strict=True)
    ]
    queue.put(queue.new_key(), [RowId(*attempt, 0) for attempt in attempts], ("tokens",), 10, sealed)


@pytest.mark.parametrize("sibling", [True, False], ids=["with its sibling", "alone"])
def test_a_sample_of_abandoned_weights_ends_its_group_which_is_issued_again(sibling: bool) -> None:
    queue = queue_at(10, 1)
    (issue,) = queue.admit("rollout", queue.version, 1)
    if sibling:
        put(queue, issue, {1: 10}, {0: 15})
    else:
        put(queue, issue, {0: 9, 1: 10})
        put(queue, Issue(issue.group, issue.attempts[1:]), {0: 11, 1: 12})
    assert queue.ledger.dropped == {"abandoned": 2}
    assert not queue.table.rows and not queue.table.blocks and queue.credits.rows == 0
    queue.report_held("rollout", frozenset(), 2)
    assert queue.account().balanced, queue.account().problem
    (again,) = queue.admit("rollout", queue.version, 1)
    assert (again.group, again.attempts[0].attempt) == (issue.group, 1)
    put(queue, issue, {0: 15})
    assert again.group in queue.ledger.live, "what an ended attempt brings is nobody's business"
    put(queue, again, {0: 10, 1: 10}, {1: 10})
    claim = queue.claim(ClaimRequest("actor", ("tokens",), 1, trains=True, step=10), 0.0)
    assert claim is not None and claim.groups == (issue.group,)


def test_an_engine_of_an_abandoned_incarnation_is_granted_nothing_at_any_step() -> None:
    queue = queue_at(10, 1)
    assert [queue.admit("rollout", Version("actor", 0, step), 1) for step in (10, 12, 15)] == [(), (), ()]
