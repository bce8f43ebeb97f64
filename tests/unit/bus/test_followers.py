# SPDX-License-Identifier: Apache-2.0
"""Tasks that train on the actor's rows after it: which rows they get, how long these stay, and what a rollback undoes."""

import dataclasses

import pytest

from relax_core.api.batch import RowId
from relax_core.api.bus import ClaimRequest, Sealed
from relax_core.api.errors import RelaxError, StaleFence
from relax_core.api.trajectory import Outcome
from relax_core.bus.queue import TransferQueue
from relax_core.testing.bus_fixture import SETTINGS, START

TASK = "critic.fit"
FOLLOWED = dataclasses.replace(
    SETTINGS, group_size=2, groups_per_step=2, max_staleness=4, followers=(TASK,), columns=()
)


def trained(queue, steps=1):
    """Steps of two groups each, one of whose rows has no gradient."""
    for _ in range(steps):
        for issue in queue.admit("rollout", queue.version, 2):
            rows = [RowId(*attempt, 0) for attempt in issue.attempts]
            sealed = [Sealed(attempt, 1, Outcome.FINISHED, 1.0, queue.version.step, 3) for attempt in issue.attempts]
            key = queue.reserve(list(issue.attempts), len(rows), 100)
            queue.put(key, rows, ("tokens",), 100, sealed)
        step = queue.version.step
        claim = queue.claim(ClaimRequest("actor", ("tokens",), 2, trains=True, step=step), 0.0)
        queue.trained([claim], step, claim.rows[:1], 0.0)
    return queue


def follow(queue, step):
    return queue.claim(ClaimRequest(TASK, ("tokens",), 0, step=step, follows=True), 0.0)


def test_a_follower_gets_all_rows_of_a_step_once_it_is_committed():
    queue = trained(TransferQueue(FOLLOWED, START), 2)
    claims = [follow(queue, step) for step in (0, 1)]
    assert [[row.group for row in claim.rows] for claim in claims] == [[0, 0, 1, 1], [2, 2, 3, 3]]
    assert follow(queue, 2) is None


def test_a_follower_may_come_again_as_after_its_death():
    queue = trained(TransferQueue(FOLLOWED, START))
    first = follow(queue, 0)
    queue.acknowledge(first, 0.0)
    queue.register("critic", 0.0)
    assert follow(queue, 0).rows == first.rows
    with pytest.raises(StaleFence):
        queue.locate(first, ("tokens",), 0.0)


def test_rows_stay_until_followers_have_acknowledged_them_and_a_checkpoint_exists():
    queue = trained(TransferQueue(FOLLOWED, START), 2)
    claim = follow(queue, 0)
    queue.finalize(2)
    assert len(queue.table.rows) == 8
    queue.acknowledge(claim, 0.0)
    assert {row.group for row in queue.table.rows} == {2, 3}
    queue.acknowledge(follow(queue, 1), 0.0)
    assert not queue.table.rows and not queue.ledger.provisional and queue.account().balanced


def test_kept_rows_over_the_budget_are_freed_only_if_no_follower_needs_them():
    small = dataclasses.replace(FOLLOWED, max_bytes=250)
    queue = trained(TransferQueue(small, START), 2)
    assert len(queue.table.rows) == 8
    queue.acknowledge(follow(queue, 0), 0.0)
    trained(queue)
    assert {row.group for row in queue.table.rows} == {2, 3, 4, 5}
    with pytest.raises(RelaxError, match="no longer kept"):
        follow(queue, 0)


def test_after_a_rollback_followers_get_acknowledged_groups_again():
    queue = trained(TransferQueue(FOLLOWED, START), 2)
    for step in (0, 1):
        queue.acknowledge(follow(queue, step), 0.0)
    under_way = follow(queue, 1)
    queue.rollback(1, 1)
    assert follow(queue, 1) is None
    with pytest.raises(StaleFence):
        queue.acknowledge(under_way, 0.0)
    trained(queue)
    queue.finalize(2)
    assert {row.group for row in queue.table.rows} >= {row.group for row in follow(queue, 1).rows}
    assert queue.account().balanced


def test_a_follower_masks_what_the_actor_masked():
    queue = trained(TransferQueue(dataclasses.replace(FOLLOWED, late="mask", max_staleness=1), START), 3)
    assert [follow(queue, step).mask_before for step in range(3)] == [0, 0, 1]


def test_a_task_that_was_not_announced_is_refused():
    queue = trained(TransferQueue(dataclasses.replace(FOLLOWED, followers=()), START))
    with pytest.raises(RelaxError, match="followers"):
        follow(queue, 0)
