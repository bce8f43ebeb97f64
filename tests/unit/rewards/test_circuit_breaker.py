# SPDX-License-Identifier: Apache-2.0
"""The circuit breaker against a plain reading of its rule."""

from __future__ import annotations

from hypothesis import given, strategies as st

from relax_core.rewards.scorer import CircuitBreaker, Fault

TYPO, OTHER = ("NameError", "a.py:3"), ("NameError", "a.py:9")


def trips(faults: list[Fault | None], first: int, window: int) -> int | None:
    """At which sample the rule is met first, read off the whole list."""
    for seen in range(1, len(faults) + 1):
        fault, recent = faults[seen - 1], faults[max(0, seen - window) : seen]
        if fault is None:
            continue
        if (seen == first and set(faults[:seen]) == {fault}) or 2 * recent.count(fault) > window:
            return seen
    return None


@given(st.lists(st.sampled_from([None, TYPO, OTHER]), max_size=60), st.integers(1, 6), st.integers(2, 12))
def test_it_trips_exactly_when_the_rule_is_met(faults: list[Fault | None], first: int, window: int) -> None:
    breaker = CircuitBreaker(first, window)
    tripped = next((number for number, fault in enumerate(faults, 1) if breaker.record(fault)), None)
    assert tripped == trips(faults, first, window)


def test_sixteen_alike_at_the_start_trip_it_and_fifteen_do_not() -> None:
    breaker = CircuitBreaker()
    assert not any(breaker.record(TYPO) for _ in range(15))
    assert breaker.record(TYPO) == "the first 16 samples"


def test_one_failing_in_two_places_is_not_alike() -> None:
    breaker = CircuitBreaker()
    assert not any(breaker.record(fault) for fault in [TYPO, OTHER] * 128)


def test_over_half_of_a_window_trips_it_late_in_a_run() -> None:
    breaker = CircuitBreaker()
    assert not any(breaker.record(None) for _ in range(1000))
    assert not any(breaker.record(TYPO) for _ in range(128))
    assert breaker.record(TYPO) == "129 of the last 256 samples"
