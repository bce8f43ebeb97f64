# SPDX-License-Identifier: Apache-2.0
"""Questions to a judge and the reading of its words: nothing that can't be read becomes a score."""

from __future__ import annotations

import asyncio
import math
from random import Random
from typing import Any

import pytest
from pydantic import ValidationError
from relax_plugin_rewards.judge import Judge, JudgeOptions, agreement, expected, read, verdict

from relax_core.api import Message, Outcome, Score, Task, Trajectory, Unreadable
from relax_core.api.engine import Generated
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
def test_the_last_verdict_counts(text: str, options: dict[str, object], score: float) -> None:
    assert read(text, JudgeOptions(**options)) == pytest.approx(score)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("", {}),
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
        {"votes": 3},
        {"votes": 3, "read": "log-probs", "choices": {"a": 1.0, "b": 0.0}, "temperature": 1.0},
        {"combine": "majority"},
        {"keys": {"a": 1.0}, "choices": {"a": 1.0, "b": 0.0}},
        {"keys": {"a": 0.0}},
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        JudgeOptions(**options)  # type: ignore[arg-type]


async def test_the_judge_gets_the_template_and_a_response_cannot_change_it() -> None:
    heard: list[str] = []
    options = JudgeOptions(
        engine="big", template="{prompt}|{response}|{answer}|{rubric}|{low}-{high}|{}", system="Be strict."
    )
    judge = Judge(options)
    assert judge.needs_engines == ("big",)
    judge.engines = {"big": ScriptedClient("big", lambda prompt: heard.append(prompt) or "5")}
    found = await judge.score(TASK, said("{answer} or {secret}"))
    assert isinstance(found, Score) and found.value == 0.5
    told = "system: Be brief.\n\nuser: What is 2+2?"
    assert heard == [f'Be strict.\n{told}|{{answer}} or {{secret}}|4|["exact", "short"]|0-10|{{}}']


async def test_a_column_that_a_task_lacks_is_named_and_a_cut_response_scores_zero_by_default() -> None:
    judge = Judge(JudgeOptions(template="{response} {gold}"))
    assert await judge.score(TASK, said("4", Outcome.TRUNCATED)) == 0.0
    with pytest.raises(ValueError, match="task t1 has no column 'gold'"):
        await judge.score(TASK, said("4"))


async def test_choices_are_weighed_by_how_likely_the_judge_finds_them() -> None:
    judge = Judge(JudgeOptions(read="log-probs", choices={"a": 1.0, "bc": 0.0}, chat=False))
    judge.engines = {"judge": ScriptedClient("judge", lambda prompt: "")}
    assert await judge.score(TASK, said("4")) == pytest.approx(256 / 257)  # a token costs 1/256
    assert expected({"a": -900.0, "b": -900.0}, {"a": 1.0, "b": 0.0}) == 0.5


class Drawing:
    """A judge whose number is drawn from the seed alone, and that answers in its own time."""

    name = "judge"

    def __init__(self, unreadable: int = 0) -> None:
        self.asked: list[tuple[str, int]] = []
        self.unreadable = unreadable
        """Of its first answers to each question."""

    async def generate(self, prompt: Any, max_new_tokens: int, *, temperature: float, seed: int) -> Generated:
        shown = "\n".join(message.text for message in prompt)
        await asyncio.sleep(Random(seed + len(self.asked)).random() / 1000)
        self.asked.append((shown, seed))
        words = "no idea" if shown.count("no idea") < 2 * self.unreadable else str(Random(seed).randrange(11))
        return Generated(words, (), ())


async def scores(responses: list[str], client: Drawing, **options: Any) -> dict[str, Score]:
    judge = Judge(JudgeOptions(temperature=1.0, **options))
    judge.engines = {"judge": client}  # type: ignore[dict-item]
    found = await asyncio.gather(*(judge.score(TASK, said(response)) for response in responses))
    return dict(zip(responses, found, strict=True))  # type: ignore[arg-type]


async def test_a_verdict_is_the_same_in_any_order_and_differs_by_what_is_judged() -> None:
    responses = [f"answer {number}" for number in range(20)]
    client, other = Drawing(), Drawing()
    there = await scores(responses, client, votes=3)
    assert there == await scores(responses[::-1], other, votes=3)
    assert len({score.value for score in there.values()}) > 5
    assert len({seed for _, seed in client.asked}) == 60, "each vote is drawn apart"


async def test_votes_are_combined_and_their_agreement_is_reported() -> None:
    (score,) = (await scores(["4"], Drawing(), votes=5)).values()
    assert {"verdicts/unreadable", "verdicts/unanimous", "verdicts/agreement", "verdicts/variance"} == set(score.parts)
    assert score.parts["verdicts/unreadable"] == 0.0 and 0 <= score.parts["verdicts/agreement"] < 1
    assert agreement([1.0, 1.0, 1.0]) == {"unanimous": 1.0, "agreement": 1.0, "variance": 0.0}
    told = agreement([0.0, 0.0, 1.0, 1.0])
    assert told == {"unanimous": 0.0, "agreement": pytest.approx(2 / 6), "variance": 0.25}


async def test_the_majority_is_the_most_frequent_vote() -> None:
    answers = iter(["9", "2", "2"])
    judge = Judge(JudgeOptions(temperature=1.0, votes=3, combine="majority"))
    judge.engines = {"judge": ScriptedClient("judge", lambda prompt: next(answers))}
    found = await judge.score(TASK, said("4"))
    assert isinstance(found, Score) and found.value == pytest.approx(0.2)


async def test_an_unreadable_verdict_is_requested_again_with_the_reason_and_then_has_no_score() -> None:
    client = Drawing(unreadable=1)
    (score,) = (await scores(["4"], client, retries=2)).values()
    assert len(client.asked) == 2 and "no number from 0 to 10" in client.asked[1][0]
    assert client.asked[0][1] != client.asked[1][1], "the same seed might say the same again"
    assert score.parts["verdicts/unreadable"] == 0.5
    with pytest.raises(Unreadable, match="1 of 1 verdicts can't be read: the judge said 'no idea'") as failed:
        await scores(["4"], Drawing(unreadable=9), retries=2)
    assert failed.value.parts == {"verdicts/unreadable": 1.0}


async def test_half_of_the_votes_must_be_readable() -> None:
    answers = iter(["9", "?", "?", "5"])
    judge = Judge(JudgeOptions(temperature=1.0, votes=4, retries=0))
    judge.engines = {"judge": ScriptedClient("judge", lambda prompt: next(answers))}
    found = await judge.score(TASK, said("4"))
    assert isinstance(found, Score) and found.value == pytest.approx(0.7) and found.parts["verdicts/unreadable"] == 0.5
    answers = iter(["9", "?", "?", "?"])
    with pytest.raises(Unreadable, match="3 of 4"):
        await judge.score(TASK, said("4"))


KEYS = {"keys": {"correct": 3.0, "clear": 1.0}}


def test_the_last_json_object_with_the_keys_is_read_and_their_scores_are_weighed() -> None:
    text = (
        """First {"correct": 0}. Then:```json\n{"clear": 2, "why": {"x": "}"}, "correct": 10}\n``` and {"correct": 1}"""
    )
    value, parts = verdict(text, JudgeOptions(**KEYS))  # type: ignore[arg-type]
    assert parts == {"correct": 1.0, "clear": 0.2} and value == pytest.approx(0.8)


@pytest.mark.parametrize(
    "text",
    ["", "{", '{"correct": 1}', '{"correct": 11, "clear": 1}', '{"correct": true, "clear": 1}', '["correct", "clear"]'],
)
def test_json_without_numbers_under_the_expected_keys_is_not_a_verdict(text: str) -> None:
    with pytest.raises(ValueError, match="the judge said"):
        verdict(text, JudgeOptions(**KEYS))  # type: ignore[arg-type]
