# SPDX-License-Identifier: Apache-2.0
"""Questions to a judge and the reading of its words: nothing that can't be read becomes a score."""

from __future__ import annotations

import math

import pytest
from pydantic import ValidationError
from relax_plugin_rewards.judge import Judge, JudgeOptions, expected, read

from relax_core.api import Message, Outcome, Task, Trajectory
from relax_core.testing.scripted_client import ScriptedClient

TASK = Task("t1", (Message("system", "Be brief."), Message("user", "What is 2+2?")), 4, {"rubric": ["exact", "short"]})


def said(response: str, outcome: Outcome = Outcome.FINISHED) -> Trajectory:
    return Trajectory((Message("user", "?"), Message("assistant", response)), response, (), outcome)


@pytest.mark.parametrize(
    ("text", "options", "score"),
    [
        ("I think 3 at first.\n7", {}, 0.7),
        ("Score: 10", {}, 1.0),
        ("8/10", {"high": 8.0}, 1.0),
        ("It has 25 mistakes, so 2", {}, 0.2),
        ("7.5.", {}, 0.75),
        ("-1 of all", {"low": -1.0, "high": 1.0}, 0.0),
        ("<score>4</score> in 3 steps", {"pattern": r"<score>(\d+)</score>"}, 0.4),
        ("No, wait: YES.", {"choices": {"yes": 1.0, "no": 0.0}}, 1.0),
        ("very good", {"choices": {"good": 0.5, "very good": 1.0}}, 1.0),
    ],
)  # fmt: skip
def test_the_last_thing_said_counts(text: str, options: dict[str, object], score: float) -> None:
    assert read(text, JudgeOptions(**options)) == pytest.approx(score)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("", {}),
        ("excellent", {}),
        ("11", {}),
        ("v2", {}),
        ("nobody knows", {"choices": {"yes": 1.0, "no": 0.0}}),
        ("4", {"pattern": "Score: (.*)"}),
        ("Score: none", {"pattern": "Score: (.*)"}),
    ],
)  # fmt: skip
def test_nonsense_is_an_error_that_quotes_it(text: str, options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="the judge said"):
        read(text, JudgeOptions(**options))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options",
    [
        {"read": "log-probs"},
        {"read": "log-probs", "choices": {"a": 1.0}},
        {"choices": {"a": math.nan}},
        {"low": 1.0, "high": 1.0},
        {"pattern": "("},
    ],
)
def test_options_that_can_not_work_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        JudgeOptions(**options)  # type: ignore[arg-type]


async def test_it_asks_what_the_template_says_and_nothing_that_a_response_writes() -> None:
    heard: list[str] = []
    options = JudgeOptions(
        engine="big", template="{prompt}|{response}|{answer}|{rubric}|{low}-{high}|{}", system="Be strict."
    )
    judge = Judge(options)
    assert judge.needs_engines == ("big",)
    judge.engines = {"big": ScriptedClient("big", lambda prompt: heard.append(prompt) or "5")}
    assert await judge.score(TASK, said("{answer} or {secret}")) == 0.5
    told = "system: Be brief.\n\nuser: What is 2+2?"
    assert heard == [f'Be strict.\n{told}|{{answer}} or {{secret}}|4|["exact", "short"]|0-10|{{}}']


async def test_a_column_that_a_task_lacks_is_named_and_a_cut_response_scores_zero_unless_told() -> None:
    judge = Judge(JudgeOptions(template="{response} {gold}"))
    assert await judge.score(TASK, said("4", Outcome.TRUNCATED)) == 0.0
    with pytest.raises(ValueError, match="task t1 has no column 'gold'"):
        await judge.score(TASK, said("4"))


async def test_choices_are_weighed_by_how_likely_the_judge_finds_them() -> None:
    judge = Judge(JudgeOptions(read="log-probs", choices={"a": 1.0, "bc": 0.0}, chat=False))
    judge.engines = {"judge": ScriptedClient("judge", lambda prompt: "")}
    assert await judge.score(TASK, said("4")) == pytest.approx(256 / 257)  # a token costs 1/256
    assert expected({"a": -900.0, "b": -900.0}, {"a": 1.0, "b": 0.0}) == 0.5
