# SPDX-License-Identifier: Apache-2.0
"""F1 of words, in scripts with and without spaces."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies
from relax_plugin_rewards.f1 import F1, F1Options, f1, words

from relax_core.api import Score, Task
from relax_core.testing.samples import trajectory


def score(answer: object, response: str, **options: object) -> Score:
    task = Task("t1", "?", answer)
    return F1(F1Options(**options)).score(task, trajectory(task, response))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("answer", "response", "value"),
    [
        ("Rome", "rome", 1.0),
        ("Rome", "It is Rome.", 0.5),
        ("the Eiffel Tower", "Eiffel tower!", 1.0),
        ("Eiffel Tower", "Tower Eiffel", 1.0),
        ("Rome", "the", 0.0),
        (["Roma", "Rome"], "Rome", 1.0),
        ("a b c", "a a a", 0.0),
        ("b b c", "b c c", 2 / 3),
        ("yes", "yes, it is", 0.0),
        ("yes", "Yes.", 1.0),
        ("noanswer", "noanswer!", 1.0),
        ("The The", "the the", 1.0),
        ("+", "+", 1.0),
        ("\u6771\u4eac\u90fd", "\u6771\u4eac", 0.8),
        ("na\u00efve caf\u00e9", "NAI\u0308VE CAFE\u0301", 1.0),
        ("\uff2e\uff39", "ny", 1.0),
        ("Stra\u00dfe", "strasse", 1.0),
        (1990, "in 1990", 2 / 3),
    ],
)  # fmt: skip
def test_words_in_common(answer: object, response: str, value: float) -> None:
    assert score(answer, response).value == pytest.approx(value)


def test_an_exact_match_may_be_asked_for() -> None:
    assert score("the Rome", "Rome!", exact_match=True).value == 1.0
    assert score("old Rome", "Rome old", exact_match=True).value == 0.0


def test_only_a_tag_or_what_follows_the_thought_may_count() -> None:
    assert score("Rome", "Because. <answer>Rome</answer>", tag="answer").value == 1.0
    assert score("Rome", "Rome", tag="answer").value == 0.0
    assert score("Rome", "<think>Paris?</think>Rome").value == 1.0


@given(strategies.text(), strategies.text())
def test_f1_is_symmetric_bounded_and_one_only_for_equal_words(one: str, other: str) -> None:
    said, gold = words(one), words(other)
    if said and gold:
        assert f1(said, gold) == f1(gold, said)
        assert 0.0 <= f1(said, gold) <= 1.0
        assert (f1(said, gold) == 1.0) == (sorted(said) == sorted(gold))
