# SPDX-License-Identifier: Apache-2.0
"""The time of a step by role, by blocker and by device, once all roles have sent their spans."""

import pytest

from relax_core.api.events import Span, TimeSpent
from relax_core.observe.spans import PATIENCE_S, TimeAccount, first_blocker


def work(track, start, end, *devices):
    return Span(track, "work", "work", start, end, "", devices)


def wait(track, start, end, blocked_by):
    return Span(track, "wait", "something", start, end, blocked_by)


def test_a_step_is_accounted_by_role_and_blocker_once_all_roles_have_sent_spans():
    account = TimeAccount()
    account.add(
        TimeSpent("actor", 10.0, (wait("actor", 0.0, 6.0, "rollout, then advantages"), work("actor", 6.0, 9.0)))
    )
    account.add(TimeSpent("rollout", 9.0, (work("rollout", 1.0, 9.0),)))
    account.step(1, 10.0, 8.0)
    assert list(account.take()) == []
    account.add(TimeSpent("rollout", 11.0, ()))
    ((window, metrics),) = account.take()
    assert (window.step, window.start, window.end) == (1, 2.0, 10.0)
    assert metrics == {
        "time/actor/busy_s": 3.0, "time/actor/wait_s": 4.0, "time/actor/idle_s": 1.0, "time/actor/wait/rollout_s": 4.0,
        "time/rollout/busy_s": 7.0, "time/rollout/wait_s": 0.0, "time/rollout/idle_s": 1.0,
    }  # fmt: skip


def test_spans_that_reach_over_a_commit_are_split_between_the_steps():
    account = TimeAccount()
    account.add(TimeSpent("actor", 9.0, (work("actor", 0.0, 9.0),)))
    account.step(1, 4.0, 4.0)
    account.step(2, 9.0, 1.0)
    busy = [metrics["time/actor/busy_s"] for _, metrics in account.take()]
    assert busy == [4.0, 5.0]


def test_the_spans_of_a_step_are_cut_at_its_window_and_parts_of_one_activity_are_joined():
    account = TimeAccount()
    account.add(TimeSpent("actor", 5.0, (work("actor", 0.0, 5.0), wait("rank-0", 2.0, 5.0, "actor"))))
    account.add(TimeSpent("actor", 9.0, (work("actor", 5.0, 6.0), wait("actor", 6.0, 9.0, "rollout"))))
    account.step(1, 4.0, 3.0)
    account.step(2, 9.0, 5.0)
    spans = {window.step: account.spans(window) for window, _ in account.take()}
    assert spans == {
        1: [work("actor", 1.0, 4.0), wait("rank-0", 2.0, 4.0, "actor")],
        2: [work("actor", 4.0, 6.0), wait("actor", 6.0, 9.0, "rollout"), wait("rank-0", 4.0, 5.0, "actor")],
    }


def test_bubbles_are_the_share_of_device_time_without_work():
    account = TimeAccount()
    ranks = (work("rank-0", 0.0, 5.0, "gpu:0"), work("rank-1", 0.0, 3.0, "gpu:1"))
    account.add(TimeSpent("actor", 10.0, (*ranks, Span("rank-0", "overhead", "publish", 5.0, 7.0, "", ("gpu:0",)))))
    account.add(TimeSpent("rollout", 10.0, (work("engine-0", 4.0, 10.0, "gpu:2"),)))
    account.step(1, 10.0, 10.0)
    ((_, metrics),) = account.take()
    assert metrics["time/bubble_fraction"] == pytest.approx(1 - 14 / 30)
    assert metrics["time/bubble_fraction/actor"] == pytest.approx(1 - 8 / 20)
    assert metrics["time/bubble_fraction/rollout"] == pytest.approx(0.4)
    assert metrics["time/generate_s"] == 6.0


def test_a_device_that_two_share_works_while_either_does():
    account = TimeAccount()
    account.add(TimeSpent("actor", 10.0, (work("rank-0", 4.0, 9.0, "gpu:0"),)))
    account.add(TimeSpent("rollout", 10.0, (work("engine-0", 0.0, 5.0, "gpu:0"),)))
    account.step(1, 10.0, 10.0)
    ((_, metrics),) = account.take()
    assert metrics["time/bubble_fraction"] == pytest.approx(0.1)


def test_a_role_that_died_holds_no_step_back_for_long_and_one_that_ended_not_at_all():
    account = TimeAccount()
    account.add(TimeSpent("rollout", 1.0, ()))
    account.add(TimeSpent("advantages", 1.0, (), over=True))
    account.add(TimeSpent("actor", 4.0 + PATIENCE_S, (work("actor", 0.0, 4.0 + PATIENCE_S),)))
    account.step(1, 5.0, 5.0)
    assert list(account.take()) == []
    account.add(TimeSpent("actor", 5.0 + PATIENCE_S, ()))
    assert [window.step for window, _ in account.take()] == [1]


def test_time_without_spans_at_the_end_counts_as_idle():
    account = TimeAccount()
    account.add(TimeSpent("actor", 1.0, (work("actor", 0.0, 1.0),)))
    account.step(1, 5.0, 5.0)
    ((_, metrics),) = account.take(finish=True)
    assert (metrics["time/actor/busy_s"], metrics["time/actor/idle_s"]) == (1.0, 4.0)


def test_the_first_name_is_the_blocker():
    blockers = ("rollout, then advantages", "actor (it publishes)", "nobody", "")
    assert [first_blocker(words) for words in blockers] == ["rollout", "actor", "nobody", "nobody"]


def test_the_slowest_rank_is_compared_with_the_median_over_its_passes_alone():
    account = TimeAccount()
    ends = {"actor-rank-0": 2.0, "actor-rank-1": 6.0, "actor-rank-2": 4.0, "reference-rank-0": 9.0}
    spans = [Span(track, "work", "accumulate", 0.0, end, "", ()) for track, end in ends.items()]
    spans += [Span("actor-rank-0", "work", "finish_update", 2.0, 9.0, "", ())]  # waits for the slower ranks
    account.add(TimeSpent("actor", 10.0, tuple(spans)))
    account.step(1, 10.0, 10.0)
    ((_, metrics),) = account.take()
    assert (metrics["trainer/slowest_rank"], metrics["trainer/slowest_rank_ratio"]) == (1.0, 1.5)


def test_a_single_rank_is_not_compared():
    account = TimeAccount()
    account.add(TimeSpent("actor", 10.0, (Span("actor-rank-0", "work", "accumulate", 0.0, 5.0, "", ()),)))
    account.step(1, 10.0, 10.0)
    ((_, metrics),) = account.take()
    assert not any(key.startswith("trainer/") for key in metrics)
