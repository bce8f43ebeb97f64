# SPDX-License-Identifier: Apache-2.0
"""The form of a response: tags, patterns and JSON; its length; and its repetitions."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, strategies
from pydantic import ValidationError
from relax_plugin_rewards.form import Format, FormatOptions, Overlong, OverlongOptions, Repetition, RepetitionOptions

from relax_core.api import Message, Outcome, Score, Task, Trajectory
from relax_core.testing.samples import trajectory

TASK = Task("t1", "How much?", "12")
TAGS = {"tags": ("think", "answer")}
RIGHT = "<think>so</think> <answer>12</answer>"
POINT = {"type": "object", "required": ["x"], "properties": {"x": {"type": "number"}}, "additionalProperties": False}


def form(response: str, outcome: Outcome = Outcome.FINISHED, **options: Any) -> Score:
    return Format(FormatOptions(**options)).score(TASK, trajectory(TASK, response, outcome))


@pytest.mark.parametrize(
    ("response", "passes"),
    [
        (RIGHT, True),
        ("\n<think>\na\n\nb</think>\n<answer></answer>\n", True),
        ("<think>1 < 2 and <b>this</b></think><answer>12</answer>", True),
        ("12", False),
        ("", False),
        ("<answer>12</answer><think>so</think>", False),
        (f"So: {RIGHT}", False),
        (f"{RIGHT} done", False),
        ("<think>so</think> or <answer>12</answer>", False),
        (RIGHT + RIGHT, False),
        ("<think>so</think><answer>12", False),
        ("<think>so</think><answer>12</think></answer>", False),
        ("<think><think>so</think><answer>12</answer>", False),
        ("<think>so<answer></think>12</answer>", False),
        ("<Think>so</Think><answer>12</answer>", False),
    ],
)
def test_every_tag_stands_once_in_its_order_and_nothing_stands_outside(response: str, passes: bool) -> None:
    assert form(response, **TAGS).value == passes
    assert form(response, **TAGS).parts == {"tags": float(passes)}


@given(strategies.text(alphabet="<>/ab 1"))
def test_a_response_built_from_its_contents_passes_and_the_last_content_is_read(text: str) -> None:
    clean = not any(mark in text for mark in ("<a>", "</a>", "<b>", "</b>"))
    for response in (f"<a>{text}</a><b>1</b>", f"<a></a> <b>{text}</b>"):
        assert form(response, tags=("a", "b")).value == clean
    wanted = float(clean and text.strip(" ") == "1")
    assert form(f"<a></a><b>{text}</b>", tags=("a", "b"), json_schema={"const": 1}).value == wanted


@pytest.mark.parametrize(
    ("response", "passes"),
    [
        ('{"x": 1.5}', True),
        (' {"x": 1}\n', True),
        ('{"x": "1"}', False),
        ('{"x": 1, "y": 2}', False),
        ('{"x": NaN}', False),
        ('```json\n{"x": 1}\n```', False),
        ('{"x": 1} {"x": 1}', False),
        ("[" * 100_000, False),
        ("", False),
    ],
)
def test_json_fulfils_its_schema(response: str, passes: bool) -> None:
    assert form(response, json_schema=POINT).value == passes


def test_a_pattern_matches_the_whole_response() -> None:
    assert form("Answer: 1\n2", pattern="Answer: .+").value == 1.0
    assert form("The Answer: 12", pattern="Answer: .+").value == form("Answer: ", pattern="Answer: .+").value == 0.0


def test_several_checks_count_together_or_as_a_share() -> None:
    both = {"pattern": r"\d+", "json_schema": {"type": "string"}}
    assert form("12", **both) == Score(0.0, {"pattern": 1.0, "json_schema": 0.0})
    assert form("12", mode="share", **both).value == 0.5
    assert form("12", Outcome.TRUNCATED, pattern=r"\d+") == Score(0.0, {"pattern": 0.0})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "set at least one"),
        ({"tags": ("a b",)}, "tags: got 'a b'"),
        ({"tags": ("a", "a")}, "name each tag once"),
        ({"pattern": "("}, "write a regular expression"),
        ({"json_schema": {"type": "nothing"}}, "draft 2020-12"),
    ],
)
def test_a_form_that_nothing_can_have_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        FormatOptions(**options)


@pytest.mark.parametrize(("count", "value"), [(0, 0.0), (6, 0.0), (7, -0.25), (9, -0.75), (10, -1.0), (99, -1.0)])
def test_the_penalty_falls_over_the_buffer_as_in_dapo(count: int, value: float) -> None:
    for unit, text in (("words", "word " * count), ("characters", "x" * count), ("tokens", "x" * count)):
        if unit == "tokens" and not count:
            continue  # the sample of an empty response has one token
        reward = Overlong(OverlongOptions(max_length=10, buffer=4, unit=unit))  # type: ignore[arg-type]
        assert reward.score(TASK, trajectory(TASK, text)) == Score(value, {"length": float(count)})
    with pytest.raises(ValidationError, match="at most max_length"):
        OverlongOptions(max_length=3)


def test_a_sample_without_tokens_is_not_taken_for_an_empty_one() -> None:
    sample = Trajectory((Message("user", "?"), Message("assistant", "12")), "12", ())
    with pytest.raises(ValueError, match="use words or characters"):
        Overlong(OverlongOptions()).score(TASK, sample)


@pytest.mark.parametrize(
    ("response", "options", "share"),
    [
        ("a b c d", {"ngram": 2}, 0.0),
        ("a b a b a", {"ngram": 2}, 0.5),
        ("a b", {"ngram": 2}, 0.0),
        ("a", {"ngram": 2}, 0.0),
        ("", {"ngram": 1}, 0.0),
        ("no " * 100, {"ngram": 1}, 0.99),
        ("abab", {"ngram": 2, "unit": "characters"}, 1 / 3),
    ],
)
def test_repeated_ngrams_cost_their_share(response: str, options: dict[str, Any], share: float) -> None:
    found = Repetition(RepetitionOptions(penalty=-2.0, **options)).score(TASK, trajectory(TASK, response))
    assert found.value == pytest.approx(-2.0 * share) and found.parts == {"repeated": pytest.approx(share)}
