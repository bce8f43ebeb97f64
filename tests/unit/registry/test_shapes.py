# SPDX-License-Identifier: Apache-2.0
"""Checks of shapes: the fast test accepts only what the thorough check accepts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from relax_core.api.environment import Step
from relax_core.registry.shapes import WrongShape, _fault, _plainly_fits, checked
from relax_core.rewards.host import ScoredSample

WANTED = (
    Any, int, float, bool, str, None, int | None, float | ScoredSample, Sequence[float], Sequence[float | ScoredSample],
    tuple[Sequence[tuple[int, str, Any]], bool], tuple[int, ...], list[str], Mapping[str, Any], Step,
    tuple[Mapping[str, float], str | tuple[int, ...]],
)  # fmt: skip
plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=2) | st.just(ScoredSample(0.5))
values = st.recursive(
    plain,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=2), inner, max_size=2)
    ),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None)
@given(values)
def test_the_fast_test_accepts_only_what_the_thorough_check_accepts(value: Any) -> None:
    for wanted in WANTED:
        assert not _plainly_fits(wanted)(value) or _fault(value, wanted, "") is None


def test_results_of_a_reward_pass_the_fast_test_and_a_wrong_one_is_named() -> None:
    wanted = tuple[Sequence[tuple[int, str, Any]], bool]
    assert _plainly_fits(wanted)(([(0, "done", 0.5), [1, "done", ScoredSample()]], False))
    with pytest.raises(WrongShape, match=r"results\[0\]\[1\]\[0\]: got 'x'"):
        checked(([(0, "done", 1), ("x", "done", 1)], False), wanted, "results")
