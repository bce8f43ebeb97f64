# SPDX-License-Identifier: Apache-2.0
"""The circuit breaker against a plain reading of its rule."""

from __future__ import annotations

from hypothesis import given, strategies as st

from relax_core.rewards.breaker import CircuitBreaker, Fault

TYPO, OTHER = ("NameError", "a.py:3"), ("NameError", "a.py:9")
Sample = tuple[Fault | None, int, int]
"""(fault, group, samples in play)."""


def trips(samples: list[Sample], first: int, window: int, limit: float) -> int | None:
    """At which sample the rule is met first, read off the whole list."""
    widths = [max(window, in_play) for _, _, in_play in samples]
    kept: list[Fault | None] = []
    for seen, ((fault, _, in_play), width) in enumerate(zip(samples, widths, strict=True), 1):
        kept = [*kept, fault][-width:]
        if fault is None:
            continue
        faults, groups = [one[0] for one in samples[:seen]], {one[1] for one in samples[:seen]}
        at_start = set(faults) == {fault} and len(kept) == seen >= max(first, in_play) and len(groups) > 1
        if at_start or kept.count(fault) > limit * width or (len(kept) == width and None not in kept):
            return seen
    return None


@given(
    st.lists(st.tuples(st.sampled_from([None, TYPO, OTHER]), st.integers(0, 2), st.integers(0, 9)), max_size=60),
    st.integers(1, 6), st.integers(2, 12), st.sampled_from([0.2, 0.5, 1.0]),
)  # fmt: skip
def test_the_breaker_opens_exactly_when_its_rule_is_met(
    samples: list[Sample], first: int, window: int, limit: float
) -> None:
    breaker = CircuitBreaker(first, window, limit)
    tripped = next((number for number, sample in enumerate(samples, 1) if breaker.record(*sample)), None)
    assert tripped == trips(samples, first, window, limit)


def test_sixteen_alike_at_the_start_trip_it_and_fifteen_do_not() -> None:
    breaker = CircuitBreaker()
    assert not any(breaker.record(TYPO, group) for group in range(15))
    assert breaker.record(TYPO, 15) == "alike on the first 16 samples"


def test_one_failing_first_group_does_not_open_the_breaker() -> None:
    breaker = CircuitBreaker()
    assert not any(breaker.record(TYPO, 0) for _ in range(64))
    assert breaker.record(TYPO, 1) == "alike on the first 65 samples"


def test_samples_in_play_may_still_succeed() -> None:
    breaker = CircuitBreaker()
    assert not any(breaker.record(TYPO, number // 8, in_play=512) for number in range(256))
    assert breaker.record(TYPO, 32, in_play=512) == "alike on 257 of the last 512 samples"


def test_failures_of_several_kinds_open_the_breaker_after_a_window_without_success() -> None:
    breaker = CircuitBreaker()
    faults = [TYPO, OTHER] * 128
    told = [breaker.record(fault, number) for number, fault in enumerate(faults)]
    assert not any(told[:-1]) and told[-1] == "on all of the last 256 samples, in several ways"


def test_over_half_of_a_window_trips_it_late_in_a_run() -> None:
    breaker = CircuitBreaker()
    assert not any(breaker.record(None) for _ in range(1000))
    assert not any(breaker.record(TYPO) for _ in range(128))
    assert breaker.record(TYPO) == "alike on 129 of the last 256 samples"


def test_a_tenth_of_the_samples_may_fail_for_good() -> None:
    breaker = CircuitBreaker()
    faults = [TYPO if number % 10 == 0 else None for number in range(5000)]
    assert not any(breaker.record(fault, number // 8) for number, fault in enumerate(faults))
    ((fault, count),) = breaker.failing()
    assert fault == TYPO and count in (25, 26) and breaker.size == 256
