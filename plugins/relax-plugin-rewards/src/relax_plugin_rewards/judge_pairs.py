# SPDX-License-Identifier: Apache-2.0
"""The reward `judge-pairs`: a second model compares the responses of a group in pairs.

Judges prefer the response that they read first (Zheng et al. 2023, arXiv:2306.05685, section 3.3). So each pair is
judged in both orders, and the mean of the two verdicts counts. Requests, retries and seeds are those of `judge`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

from pydantic import NonNegativeInt, model_validator

from relax_core.api import GroupReward, Outcome, Score, Task, Trajectory, Unreadable
from relax_plugin_rewards.judge import (
    VERDICTS,
    Asking,
    AskOptions,
    Vote,
    check_pattern,
    chosen,
    filled,
    matched,
    start_all,
)

TEMPLATE = """\
Compare two answers to a question.

Question:
{prompt}

Answer A:
{first}

Answer B:
{second}

Which answer is better? The order of the answers and their lengths say nothing about their quality. Think it over, then
end with a line of its own that has only [[A]], [[B]] or [[tie]]."""


class JudgePairsOptions(AskOptions):
    """Options of `judge-pairs`."""

    template: str = TEMPLATE
    """Text of the question to the judge. `{prompt}`, the two responses `{first}` and `{second}`, and columns of the task
    file, such as `{rubric}`, are filled in."""
    choices: dict[str, float] = {"A": 1.0, "B": 0.0, "tie": 0.5}
    """Words that the judge may answer, with the score of the first response, from 0 to 1."""
    pattern: str = r"\[\[(\w+)\]\]"
    """Regular expression for the part of the answer to read: the last match counts, or its first group. Empty: the whole
    answer."""
    read: Literal["text", "log-probs"] = "text"
    """Source of a verdict. `text`: the last choice in the judge's answer; `log-probs`: the mean score of the choices,
    weighted by the probability that each choice is the judge's whole answer."""
    opponents: NonNegativeInt = 0
    """Number of following samples of the group that each sample is compared with; after the last sample comes the first.
    0: compare all pairs. Every comparison costs two requests."""

    @model_validator(mode="after")
    def _comparable(self) -> JudgePairsOptions:
        for place in ("{first}", "{second}"):
            if place not in self.template:
                raise ValueError(f"template has no {place}, so the judge can't compare; add both responses")
        if len(self.choices) < 2 or not all(0 <= score <= 1 for score in self.choices.values()):
            raise ValueError(f"choices: got {self.choices}; give two or more words, each with a score from 0 to 1")
        check_pattern(self.pattern)
        return self


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two responses, and the judge's verdicts on them in both orders.

    `forward` and `backward` hold the score of the response that was shown first.
    """

    forward: Vote
    backward: Vote

    @property
    def readable(self) -> bool:
        return self.forward.readable and self.backward.readable

    @property
    def value(self) -> float:
        """Score of the response that `forward` shows first, from 0 to 1."""
        return (self.forward.value + 1 - self.backward.value) / 2

    @property
    def position_bias(self) -> float:
        """1: the judge prefers the first response in both orders; -1: the second; 0: both orders agree."""
        return self.forward.value + self.backward.value - 1


class JudgePairs(GroupReward[JudgePairsOptions], Asking):
    """A reward from comparisons within a group: the share that a response wins, from 0 to 1; a tie is half a win.

    Equal responses tie without a request. A sample without a comparison scores 0.5.
    """

    def __init__(self, options: JudgePairsOptions | None = None) -> None:
        super().__init__(options)
        self.needs_engines = (self.options.engine,)

    async def score_group(self, task: Task, trajectories: Sequence[Trajectory]) -> list[Score | Unreadable]:
        cut = [one.outcome is Outcome.TRUNCATED and not self.options.truncated for one in trajectories]
        texts = [one.response for one in trajectories]
        pairs = pairs_of(len(texts), self.options.opponents)
        asked = [(i, j) for i, j in pairs if not (cut[i] or cut[j]) and texts[i] != texts[j]]
        found = await start_all(self._compare(task, texts[i], texts[j]) for i, j in asked)
        judged = dict(zip(asked, found, strict=True))
        return [self._scored(index, cut, pairs, judged) for index in range(len(texts))]

    async def _compare(self, task: Task, one: str, other: str) -> Comparison:
        forward, backward = await start_all([self._verdict(task, one, other), self._verdict(task, other, one)])
        return Comparison(forward, backward)

    async def _verdict(self, task: Task, first: str, second: str) -> Vote:
        asked = filled(self.options.template, task, {"first": first, "second": second})
        if self.options.read == "log-probs":
            return Vote(await self.expected(asked, self.options.choices))
        return await self.ask(asked, 0, self._read)

    def _read(self, said: str) -> tuple[float, Mapping[str, float]]:
        return chosen(matched(said, self.options.pattern), said, self.options.choices), {}

    def _scored(
        self, index: int, cut: Sequence[bool], pairs: Sequence[tuple[int, int]],
        judged: Mapping[tuple[int, int], Comparison],
    ) -> Score | Unreadable:  # fmt: skip
        """Return the mean of a sample's comparisons; an error if less than half of them are readable."""
        own = [pair for pair in pairs if index in pair]
        verdicts = [judged[pair] for pair in own if pair in judged]
        readable = [one for one in verdicts if one.readable]
        parts: dict[str, float] = {}
        if verdicts:
            votes = [vote for one in verdicts for vote in (one.forward, one.backward)]
            answers = sum(vote.unread + vote.readable for vote in votes)
            parts[f"{VERDICTS}/unreadable"] = sum(vote.unread for vote in votes) / answers
        if readable:
            biases = [one.position_bias for one in readable]
            parts[f"{VERDICTS}/position_bias"] = math.fsum(biases) / len(biases)
            parts[f"{VERDICTS}/consistent"] = 1 - math.fsum(map(abs, biases)) / len(biases)
        missing = len(verdicts) - len(readable)
        if 2 * missing > len(own):
            error = next(vote.error for vote in votes if not vote.readable)
            return Unreadable(f"{missing} of {len(own)} comparisons can't be read: {error}", parts)
        wins: list[float] = []
        for pair in own:
            other = pair[0] + pair[1] - index
            if cut[index] or cut[other]:
                wins.append(0.0 if cut[index] else 1.0)
            elif pair not in judged:
                wins.append(0.5)
            elif judged[pair].readable:
                wins.append(judged[pair].value if pair[0] == index else 1 - judged[pair].value)
        return Score(math.fsum(wins) / len(wins) if wins else 0.0 if cut[index] else 0.5, parts)


def pairs_of(size: int, opponents: int) -> list[tuple[int, int]]:
    """Return pairs (i, j) with i < j of a group of `size`: all, or each sample with the next `opponents`, in a ring."""
    if not opponents or 2 * opponents >= size - 1:
        return list(combinations(range(size), 2))
    ring = ((i, (i + step) % size) for i in range(size) for step in range(1, opponents + 1))
    return sorted((min(pair), max(pair)) for pair in ring)
