# SPDX-License-Identifier: Apache-2.0
"""Promises of all rewards that judge by rules: any text has a finite score within the bounds, the same each time, in time."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import assume, example, given, settings, strategies
from relax_plugin_rewards.choices import Gpqa, GpqaOptions, MultipleChoice, MultipleChoiceOptions
from relax_plugin_rewards.dapo import Dapo, DapoOptions
from relax_plugin_rewards.deepscaler import DeepScaler, DeepScalerOptions
from relax_plugin_rewards.exact import Exact, ExactOptions
from relax_plugin_rewards.f1 import F1, F1Options
from relax_plugin_rewards.form import Format, FormatOptions
from relax_plugin_rewards.geo3k import Geo3k, Geo3kOptions
from relax_plugin_rewards.instructions import Instructions, InstructionsOptions
from relax_plugin_rewards.maths import Maths, MathsOptions
from relax_plugin_rewards.openr1mm import OpenR1MM, OpenR1MMOptions
from relax_plugin_rewards.random_score import RandomScore, RandomScoreOptions

from relax_core.api import Options, Outcome, Score, Task
from relax_core.testing.samples import trajectory

FOLLOW = {
    "instructions": [
        {"name": "number_words", "arguments": {"num_words": 4, "relation": "at most"}},
        {"name": "existence", "arguments": {"keywords": ["12"]}},
        {"name": "number_sentences", "arguments": {"num_sentences": 1, "relation": "at least"}},
        {"name": "postscript", "arguments": {"postscript_marker": "P.S."}},
    ]
}
FIGURE = r"<think>so</think> \boxed{12}"


@dataclass(frozen=True)
class Case:
    """A reward, a task for it, and the responses that it pays most and least."""

    reward: type[Any]
    options: Options
    best: str
    task: Task = Task("t1", "How much?", "12")
    low: float = 0.0
    least: tuple[str, ...] = field(default=("", "no idea", "I think that it is 12 rather than 13, or perhaps 14"))

    def score(self, response: str, outcome: Outcome = Outcome.FINISHED, task: Task | None = None) -> float:
        own = task or self.task
        result = self.reward(self.options).score(own, trajectory(own, response, outcome))
        if isinstance(result, Score):
            assert all(map(math.isfinite, result.parts.values()))
            return result.value
        return float(result)


CHOICE = Task("t1", "Which?", "B", {"choices": ["12", "13", "14"]})
CASES = [
    Case(Exact, ExactOptions(), "12"),
    Case(Maths, MathsOptions(), "It is $12$", least=("", "no idea", "12, 13 and 14")),
    Case(DeepScaler, DeepScalerOptions(), r"\boxed{12}"),
    Case(Dapo, DapoOptions(), "Answer: 12", low=-1.0),
    Case(Dapo, DapoOptions(strict_box=True, tail=10**6), r"\boxed{12}", low=-1.0),
    Case(OpenR1MM, OpenR1MMOptions(), "<think>so</think><answer>12</answer>"),
    Case(Geo3k, Geo3kOptions(), FIGURE),
    Case(
        MultipleChoice, MultipleChoiceOptions(), "Answer: B", CHOICE, least=("", "13 or 14", "A, B, C", "It is B or C")
    ),
    Case(Gpqa, GpqaOptions(), "Answer: B", Task("t1", "Which?", "B"), least=("", "Beta", "A\nB\nC\nD", "Answer: B, C")),
    Case(F1, F1Options(), "12", least=("", "no idea", "thirteen")),
    Case(F1, F1Options(exact_match=True), "12"),
    Case(Instructions, InstructionsOptions(loose=True), "12!\nP.S. x", Task("t1", "?", None, FOLLOW)),
    Case(
        Instructions, InstructionsOptions(mode="share"), "12!\nP.S. x", Task("t1", "?", None, FOLLOW), least=("", " ")
    ),
    Case(Format, FormatOptions(tags=("think", "answer")), "<think>so</think>\n<answer>12</answer>"),
    Case(Format, FormatOptions(json_schema={"type": "integer"}), "12"),
    Case(RandomScore, RandomScoreOptions(), "", least=()),
]
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.reward.__name__)
judging = pytest.mark.parametrize("case", CASES[:-1], ids=lambda case: case.reward.__name__)

PIECES = [
    r"\boxed{", r"\fbox{", "}", "{", "<think>", "</think>", "<answer>", "</answer>", "Answer:", "answer is ", "B", "(B)", "12",
    r"\frac", "^", "!", "$", "\\", "=", "%", ",", ".", "\n", " ", "or", "x", "1/2", "0", "e9", "-", "P.S.", "*", "[", "\u6d77",
    "\ue000", "\x00", "\u0660", "\u00b2", "\u2153", r"\text{", r"\sqrt", "nan", "inf",
]  # fmt: skip
RESPONSES = strategies.text() | strategies.lists(strategies.sampled_from(PIECES), max_size=12).map("".join)


@every_case
@settings(max_examples=30)
@example(response="\\boxed{" + "9" * 5000 + "}")
@example(response="Answer: " + "9" * 5000)
@example(response=r"\boxed{\frac{1}{0}}")
@example(response=r"\boxed{0^{-1}}")
@example(response=r"\boxed{\infty}")
@example(response=r"\boxed{1e400}")
@given(response=RESPONSES)
def test_any_text_has_a_finite_score_within_the_bounds_and_the_same_each_time(case: Case, response: str) -> None:
    assume(
        case.reward is not Maths or "^" not in response
    )  # it reads all of a response: its deadline ends a tower of powers
    score = case.score(response)
    assert case.low <= score <= 1.0
    assert case.score(response) == score


@pytest.mark.parametrize("answer", ["1e5000", "1.5e-5000"])
def test_a_gold_of_more_digits_than_python_writes_is_shown_as_written(answer: str) -> None:
    gold = Maths(MathsOptions()).gold(Task("t1", "?", answer))
    assert answer in gold.read


@judging
def test_the_right_answer_pays_most_and_nothing_pays_least(case: Case) -> None:
    assert case.score(case.best) == 1.0
    assert [case.score(response) for response in case.least] == [case.low] * len(case.least)


@judging
def test_a_response_cut_off_pays_least_by_default(case: Case) -> None:
    assert case.score(case.best, Outcome.TRUNCATED) == case.low
    lenient = replace(case, options=case.options.model_copy(update={"truncated": True}))
    assert lenient.score(case.best, Outcome.TRUNCATED) == 1.0


@pytest.mark.parametrize("case", CASES[:-3], ids=lambda case: case.reward.__name__)  # a form needs no answer
def test_an_unjudgeable_task_is_named_for_any_response(case: Case) -> None:
    for response in ("", case.best):
        for outcome in (Outcome.FINISHED, Outcome.TRUNCATED):
            with pytest.raises(ValueError, match="task t9"):
                case.score(response, outcome, Task("t9", "?"))


def test_random_numbers_depend_on_seed_task_and_response_and_spread() -> None:
    task, other = Task("t1", "?"), Task("t2", "?")
    numbers = [RandomScore().score(task, trajectory(task, str(at))) for at in range(1000)]
    assert len(set(numbers)) == 1000
    assert abs(sum(numbers) / 1000 - 0.5) < 0.05
    assert RandomScore().score(other, trajectory(other, "0")) != numbers[0]
    assert RandomScore(RandomScoreOptions(seed=1)).score(task, trajectory(task, "0")) != numbers[0]
    scaled = RandomScore(RandomScoreOptions(low=-2.0, high=2.0)).score(task, trajectory(task, "0"))
    assert scaled == pytest.approx(4 * numbers[0] - 2)


@pytest.mark.parametrize("options", [{"low": 1.0}, {"high": math.inf}, {"low": math.nan}])
def test_invalid_random_bounds_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError):
        RandomScoreOptions(**options)
