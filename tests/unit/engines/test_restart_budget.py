# SPDX-License-Identifier: Apache-2.0
"""A budget forgives as many failures as it says, and is refilled by progress or by time."""

from __future__ import annotations

from hypothesis import given, strategies as st

from relax_core.rpc.waiting import RestartBudget


@given(st.integers(0, 5), st.lists(st.sampled_from(["fail", "progress"])))
def test_only_more_failures_in_a_row_than_the_limit_spend_it(limit: int, events: list[str]) -> None:
    budget, in_a_row = RestartBudget(limit), 0
    for event in events:
        if event == "progress":
            budget.refill()
            in_a_row = 0
        else:
            in_a_row += 1
            assert budget.spend() is (in_a_row <= limit)
        assert budget.spent == in_a_row


@given(st.integers(0, 3), st.lists(st.floats(0.0, 20.0), max_size=12))
def test_failures_longer_ago_than_the_window_are_forgiven(limit: int, gaps: list[float]) -> None:
    budget, now, times = RestartBudget(limit, window_s=10.0), 0.0, list[float]()
    for gap in gaps:
        now += gap
        times.append(now)
        recent = [time for time in times if now - time <= 10.0]
        assert budget.spend(now) is (len(recent) <= limit)
