# SPDX-License-Identifier: Apache-2.0
"""Restarts of a whole run: which errors have one, how many in a row, and what the run ends with."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from relax_core.api.errors import ConfigError, DiskFull, InfrastructureError, PluginError, RelaxError, WorkerDied
from relax_core.control.restarts import MAX_PAUSE_S, RunRestarts


def ready(limit: int, step: int = 0) -> RunRestarts:
    restarts = RunRestarts(limit, step)
    restarts.ready()
    return restarts


@pytest.mark.parametrize(
    "error",
    [ConfigError("a", "b", "c"), PluginError("maths", "division by zero"), RelaxError("NaN"), DiskFull("full")],
)
def test_an_error_that_a_restart_does_not_mend_is_not_retried(error: RelaxError) -> None:
    restarts = ready(3)
    assert not restarts.grant(error, 5, stopping=False)
    assert restarts.final(error) is error


def test_neither_a_first_start_nor_a_run_that_is_stopped_is_restarted() -> None:
    died = WorkerDied("rank 0 died")
    assert not RunRestarts(3, 0).grant(died, 0, stopping=False)
    assert not ready(3).grant(died, 0, stopping=True)
    assert ready(3).grant(died, 0, stopping=False)


def test_a_spent_budget_ends_the_run_with_the_first_reason_and_the_number_of_restarts() -> None:
    restarts, last = ready(2, step=4), WorkerDied("again")
    assert restarts.grant(WorkerDied("rank 0 died"), 4, stopping=False) and restarts.pause_s == 0
    assert restarts.grant(WorkerDied("and again"), 4, stopping=False) and restarts.pause_s > 0
    assert not restarts.grant(last, 4, stopping=False)
    final = restarts.final(last)
    assert isinstance(final, InfrastructureError)
    assert str(final) == (
        "rank 0 died; the run restarted by itself 2 times, got no further than step 4, and ended with: again"
    )


def test_without_a_budget_the_error_itself_ends_the_run() -> None:
    restarts, died = ready(0), WorkerDied("rank 0 died")
    assert not restarts.grant(died, 4, stopping=False)
    assert restarts.final(died) is died


@given(st.integers(0, 4), st.lists(st.integers(0, 12), max_size=60))
def test_restarts_in_a_row_are_bounded_and_only_a_later_checkpoint_gives_them_back(
    limit: int, saved: list[int]
) -> None:
    """A run that always fails ends: at most `limit` restarts for each step that a checkpoint ever reached first."""
    restarts, furthest, in_a_row = ready(limit), 0, 0
    for step in saved:
        in_a_row = 1 if step > furthest else in_a_row + 1
        furthest = max(furthest, step)
        granted = restarts.grant(WorkerDied("died"), step, stopping=False)
        assert granted == (in_a_row <= limit) and restarts.in_a_row == in_a_row
        assert 0 <= restarts.pause_s <= MAX_PAUSE_S
        if not granted:
            return
