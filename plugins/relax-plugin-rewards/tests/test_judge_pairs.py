# SPDX-License-Identifier: Apache-2.0
"""Comparisons of a group's responses by a judge: both orders count, and a bad answer costs only its own comparison."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from hypothesis import given, strategies
from pydantic import ValidationError
from relax_plugin_rewards.judge_pairs import JudgePairs, JudgePairsOptions, pairs_of

from relax_core.api import Message, Outcome, Score, Task, Trajectory, Unreadable
from relax_core.api.engine import Generated
from relax_core.testing.scripted_client import ScriptedClient

TASK = Task("t1", "Which number is larger?")
PLAIN = {"template": "{first}|{second}", "chat": False}


def said(response: str, outcome: Outcome = Outcome.FINISHED) -> Trajectory:
    return Trajectory((Message("user", "?"), Message("assistant", response)), response, (), outcome)


async def scored(judge: Callable[[str], str], *responses: str | Trajectory, **options: Any) -> list[Score | Unreadable]:
    reward = JudgePairs(JudgePairsOptions(**PLAIN, **options))
    reward.engines = {"judge": ScriptedClient("judge", judge)}
    return await reward.score_group(TASK, [one if isinstance(one, Trajectory) else said(one) for one in responses])


def values(found: list[Score | Unreadable]) -> list[float]:
    assert all(isinstance(one, Score) for one in found), found
    return [one.value for one in found if isinstance(one, Score)]


def larger(asked: str) -> str:
    """Prefer the larger number."""
    first, second = map(int, re.findall(r"\d+", asked)[:2])
    return f"A is a guess, so [[{'A' if first > second else 'B'}]]"


async def test_a_response_scores_the_share_of_comparisons_that_it_wins() -> None:
    found = await scored(larger, "3", "1", "2", "2")
    assert values(found) == pytest.approx([1.0, 0.0, 0.5, 0.5])
    assert all(isinstance(one, Score) and one.parts == {
        "verdicts/unreadable": 0.0, "verdicts/position_bias": 0.0, "verdicts/consistent": 1.0,
    } for one in found)  # fmt: skip


@pytest.mark.parametrize(("word", "bias"), [("A", 1.0), ("B", -1.0)])
async def test_a_judge_that_only_looks_at_the_position_pays_all_alike_and_is_seen(word: str, bias: float) -> None:
    found = await scored(lambda asked: f"[[{word}]]", "3", "1", "2")
    assert values(found) == [0.5, 0.5, 0.5]
    assert isinstance(found[0], Score)
    assert found[0].parts["verdicts/position_bias"] == bias and found[0].parts["verdicts/consistent"] == 0.0


async def test_an_unreadable_comparison_costs_only_samples_with_too_few_readable_ones() -> None:
    garbage = "no idea " * 131_072  # 1 MB

    def judge(asked: str) -> str:
        return garbage if "bad" in asked.split("\n")[0] else larger(asked)

    found = await scored(judge, "3", "bad", "1", "2", retries=0)
    assert isinstance(found[1], Unreadable)
    assert "3 of 3 comparisons can't be read: the judge said" in str(found[1]) and len(str(found[1])) < 500
    assert found[1].parts == {"verdicts/unreadable": 1.0}
    assert values([found[0], *found[2:]]) == [1.0, 0.0, 0.5]
    assert isinstance(found[0], Score) and found[0].parts["verdicts/unreadable"] == pytest.approx(1 / 3)


async def test_a_truncated_response_loses_without_a_request() -> None:
    asked: list[str] = []

    def judge(text: str) -> str:
        asked.append(text)
        return larger(text)

    found = await scored(judge, "1", said("9", Outcome.TRUNCATED), "2")
    assert values(found) == [0.5, 0.0, 1.0]
    assert not any("9" in text for text in asked)


async def test_samples_without_a_comparison_score_half() -> None:
    assert values(await scored(larger, "1")) == [0.5]
    assert values(await scored(larger, "1", "1")) == [0.5, 0.5]


class Drawing:
    """A judge whose choice is drawn from the seed alone, and that answers in its own time."""

    name = "judge"

    def __init__(self, late: int) -> None:
        self._late, self.seeds = Random(late), list[int]()

    async def generate(self, prompt: Any, max_new_tokens: int, *, temperature: float, seed: int) -> Generated:
        for _ in range(self._late.randrange(5)):
            await asyncio.sleep(0)
        self.seeds.append(seed)
        return Generated(f"[[{Random(seed).choice(['A', 'B', 'tie'])}]]", (), ())


async def test_a_verdict_does_not_depend_on_the_order_of_samples_or_answers() -> None:
    responses = [str(number) for number in range(8)]
    results, seeds = [], []
    for late, order in enumerate((responses, responses[::-1])):
        client, reward = Drawing(late), JudgePairs(JudgePairsOptions(**PLAIN, temperature=1.0))
        reward.engines = {"judge": client}  # type: ignore[dict-item]
        found = await reward.score_group(TASK, [said(one) for one in order])
        results.append(dict(zip(order, map(pytest.approx, values(found)), strict=True)))
        seeds.append(sorted(client.seeds))
    assert {name: one.expected for name, one in results[0].items()} == results[1]
    assert seeds[0] == seeds[1] and len(set(seeds[0])) == 56, "both orders of 28 pairs"


@given(size=strategies.integers(0, 12), opponents=strategies.integers(0, 12))
def test_every_sample_has_the_same_number_of_comparisons(size: int, opponents: int) -> None:
    pairs = pairs_of(size, opponents)
    assert len(set(pairs)) == len(pairs) and all(0 <= one < other < size for one, other in pairs)
    counts = Counter(index for pair in pairs for index in pair)
    each = min(2 * opponents or size, size - 1)
    assert all(counts[index] == each for index in range(size))


@pytest.mark.parametrize(
    "options",
    [{"template": "{first}"}, {"choices": {"A": 1.0}}, {"choices": {"A": 2.0, "B": 0.0}}, {"pattern": "("},
     {"choices": {"A": float("nan"), "B": 0.0}}],
)  # fmt: skip
def test_options_that_cannot_work_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        JudgePairsOptions(**options)
