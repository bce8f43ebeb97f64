# SPDX-License-Identifier: Apache-2.0
"""The account sees what was lost, because it counts from the holders and compares ids."""

from __future__ import annotations

import pytest

from relax_core.api.batch import AttemptId, RowId
from relax_core.api.bus import BusSettings, ClaimRequest, Sealed
from relax_core.api.errors import RelaxError
from relax_core.api.trajectory import DropReason, Outcome
from relax_core.api.weights import Version
from relax_core.bus.queue import TransferQueue

START = Version("actor", 0, 0)


@pytest.fixture
def queue():
    """Three groups of two: the first on the bus, the second running, the third on its way to the holder."""
    queue = TransferQueue(BusSettings(2, 2, 1), START)
    first, second = queue.admit("rollout", START, 2)
    queue.report_held("rollout", frozenset((*first.attempts, *second.attempts)), 4)
    for attempt in first.attempts:
        rows = [RowId(*attempt, row) for row in range(2)]
        queue.put(queue.new_key(), rows, ("tokens",), 10, [Sealed(attempt, 2, Outcome.FINISHED, 1.0, 0, 5)])
    queue.report_held("rollout", frozenset(second.attempts), 4)
    queue.admit("rollout", START, 1)
    assert queue.account().balanced and queue.account().in_flight == 6
    return queue


def test_a_group_is_trained_once(queue):
    group = queue.ledger.live[0]
    queue.ledger.train(group, 1, frozenset())
    trained = queue.ledger.records[:]
    with pytest.raises(RelaxError, match="group 0 would be trained twice"):
        queue.ledger.train(group, 2, frozenset())
    assert queue.ledger.records == trained


def lose_a_row(queue):
    del queue.table.rows[RowId(0, 1, 0, 1)]


def lose_an_attempt(queue):
    queue.report_held("rollout", frozenset([AttemptId(1, 0, 0)]), 4)


def hold_what_was_never_issued(queue):
    queue.report_held("rollout", frozenset([AttemptId(1, 0, 0), AttemptId(1, 1, 0), AttemptId(99, 0, 0)]), 4)


def lose_a_lease(queue):
    claim = queue.claim(ClaimRequest("actor", ("tokens",), 1, trains=True), now=0.0)
    assert queue.account().balanced
    del queue.leases.out[claim.lease]


def lose_a_sample_of_the_ledger(queue):
    del queue.ledger.live[1].members[AttemptId(1, 1, 0)]


@pytest.mark.parametrize(
    ("break_it", "said"),
    [
        (lose_a_row, "without a holder: 0/1/0"),
        (lose_an_attempt, "without a holder: 1/1/0"),
        (hold_what_was_never_issued, "not in flight in the ledger: 99/0/0"),
        (lose_a_lease, "claimed groups [0] differ from leased groups []"),
        (lose_a_sample_of_the_ledger, "1/1/0"),
    ],
)
def test_an_unbalanced_account_names_the_lost_attempts(queue, break_it, said):
    break_it(queue)
    account = queue.account()
    assert not account.balanced
    assert said in account.problem


def test_a_report_made_before_an_admission_does_not_miss_it(queue):
    queue.report_held("rollout", frozenset([AttemptId(1, 0, 0), AttemptId(1, 1, 0)]), 4)
    assert queue.account().balanced, "group 2 was admitted after the holder counted"
    queue.report_held("rollout", frozenset([AttemptId(1, 0, 0), AttemptId(1, 1, 0)]), 6)
    assert "2/0/0, 2/1/0" in queue.account().problem


def test_a_report_that_was_overtaken_is_ignored(queue):
    held = frozenset(AttemptId(group, sample, 0) for group in (1, 2) for sample in (0, 1))
    queue.report_held("rollout", held, 6)
    queue.report_held("rollout", frozenset(), 4)
    assert queue.account().balanced


def test_the_gate_counts_live_groups_from_the_holders(queue):
    assert queue.held_groups() == {0, 1, 2}
    queue.report_held("rollout", frozenset([AttemptId(1, 0, 0), AttemptId(1, 1, 0)]), 6)
    assert queue.held_groups() == {0, 1}, "group 2 was lost by its holder and holds no place"


def test_statistics_contain_lag_and_lengths_of_dropped_samples(queue):
    claim = queue.claim(ClaimRequest("actor", ("tokens",), 1, trains=True), now=0.0)
    queue.trained([claim], 0, [], now=0.0)
    queue.drop([AttemptId(1, 0, 0)], DropReason.FILTERED)
    told = queue.statistics()
    assert told["lag_histogram"] == {0: 2} and told["trained_lengths"] == {8: 2}
    assert told["dropped_lengths"]["filtered"] == {-1: 1}, "it was not finished, so its length is not known"
    assert told["waited_for"] == [1, 2]
    assert (told["oldest_group"], told["oldest_open"], told["next_group"]) == (0, 1, 3)
    queue.register("rollout", now=0.0)
    assert queue.statistics()["oldest_open"] == 1, "group 1 is to be issued again"


def test_a_producer_reports_the_lengths_of_aborted_attempts(queue):
    second = frozenset([AttemptId(1, 0, 0), AttemptId(1, 1, 0)])
    queue.drop(sorted(second), DropReason.STALE)
    assert queue.statistics()["dropped_lengths"] == {"stale": {-1: 2}}
    assert queue.report_held("rollout", second, 4) == second, "it is told to give them up"
    queue.report_held("rollout", frozenset(), 4, {AttemptId(1, 0, 0): 300, AttemptId(0, 0, 0): 5})
    assert queue.statistics()["dropped_lengths"] == {"stale": {-1: 1, 512: 1}}, "of others it may say what it likes"
    late = AttemptId(1, 1, 0)
    queue.put(queue.new_key(), [RowId(*late, 0)], ("tokens",), 10, [Sealed(late, 1, Outcome.FINISHED, 1.0, 0, 5)])
    assert queue.statistics()["dropped_lengths"] == {"stale": {8: 1, 512: 1}}, "it had finished when it ended"


def test_lengths_of_dropped_samples_include_those_that_a_rollback_drops(queue):
    claim = queue.claim(ClaimRequest("actor", ("tokens",), 1, trains=True), now=0.0)
    queue.trained([claim], 0, [], now=0.0)
    queue.rollback(0, 1)
    assert queue.statistics()["dropped"] == {"abandoned": 4}
    assert queue.statistics()["dropped_lengths"] == {"abandoned": {-1: 4}}
    queue.report_held("rollout", frozenset(), 6, {AttemptId(1, 0, 0): 300})
    assert queue.statistics()["dropped_lengths"] == {"abandoned": {-1: 3, 512: 1}}
