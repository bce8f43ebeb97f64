# SPDX-License-Identifier: Apache-2.0
"""A judge: another model is asked what a response is worth, and its number or its choice is the score.

It is asked through a pool of `[[engines]]`. An answer that can't be read is an error of that sample, never a zero.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Mapping
from typing import Literal

from pydantic import Field, PositiveInt, model_validator

from relax_core.api import Message, Options, Outcome, Reward, Task, Trajectory

TEMPLATE = """\
Judge the answer to a question.

Question:
{prompt}

Answer:
{response}

How good is the answer? Think it over, then end with a line of its own that has only a number from {low} to {high}."""
_PLACE = re.compile(r"\{(\w+)\}")
_NUMBER = re.compile(r"(?<![\w.])[+-]?\d+(?:\.\d+)?(?![\w])")


class JudgeOptions(Options):
    """Options of `judge`."""

    engine: str = "judge"
    """Pool of `[[engines]]` that is asked."""
    template: str = TEMPLATE
    """The question: `{prompt}`, `{response}`, `{low}`, `{high}`, and any column of the task file, such as `{answer}`."""
    system: str = ""
    """The system message to the judge; empty: none."""
    chat: bool = True
    """Ask by the chat template of the judge; false: the text as it stands, for models that have none."""
    low: float = 0.0
    """The worst number; its score is 0. Numbers out of bounds can't be read."""
    high: float = 10.0
    """The best number; its score is 1."""
    choices: dict[str, float] = {}
    """Instead of a number: words that the judge chooses from, and their scores, `{yes = 1.0, no = 0.0}`."""
    read: Literal["text", "log-probs"] = "text"
    """`text`: the last number or choice in what it writes; `log-probs`: the mean score of the choices, by how likely the
    judge finds each as its whole answer."""
    pattern: str = ""
    """Expression whose last match in the text is read, its first group where it has one, such as `Score: (\\d+)`."""
    max_new_tokens: PositiveInt = 512
    """Most tokens of its answer."""
    temperature: float = Field(0.0, ge=0.0)
    """0: the likeliest answer; else drawn, from a seed that the question and the response make."""
    truncated: bool = False
    """Judge a response that a limit cut off; otherwise it scores 0: finishing is part of the task."""

    @model_validator(mode="after")
    def _readable(self) -> JudgeOptions:
        if self.read == "log-probs" and len(self.choices) < 2:
            raise ValueError('read = "log-probs" compares choices: give two or more')
        if self.choices and not all(map(math.isfinite, self.choices.values())):
            raise ValueError("the scores of choices are finite numbers")
        if not self.low < self.high:
            raise ValueError("low must be less than high")
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise ValueError(f"pattern is no regular expression: {error}") from None
        return self


class Judge(Reward[JudgeOptions]):
    """A reward by another model's opinion of the response, from 0 to 1, or the score of its choice."""

    def __init__(self, options: JudgeOptions | None = None) -> None:
        super().__init__(options)
        self.needs_engines = (self.options.engine,)

    async def score(self, task: Task, trajectory: Trajectory) -> float:
        if trajectory.outcome is Outcome.TRUNCATED and not self.options.truncated:
            return 0.0
        asked = self.question(task, trajectory.response)
        prompt = self._messages(asked) if self.options.chat else asked
        hand, options = self.engines[self.options.engine], self.options
        if options.read == "log-probs":
            scores = await hand.score(prompt, list(options.choices))
            return expected(dict(zip(options.choices, map(sum, scores), strict=True)), options.choices)
        seed = zlib.crc32(asked.encode())
        said = await hand.generate(prompt, options.max_new_tokens, temperature=options.temperature, seed=seed)
        return read(said.text, options)

    def question(self, task: Task, response: str) -> str:
        """Fill the template in, once: what a response writes in braces stays as it is."""
        own = {
            "prompt": _shown(task),
            "response": response,
            "low": f"{self.options.low:g}",
            "high": f"{self.options.high:g}",
        }

        def filled(place: re.Match[str]) -> str:
            name = place[1]
            value = own.get(name, task.column(name))
            if value is None:
                raise ValueError(f"task {task.id} has no column {name!r}, which the judge's template names")
            return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)

        return _PLACE.sub(filled, self.options.template)

    def _messages(self, asked: str) -> tuple[Message, ...]:
        system = (Message("system", self.options.system),) if self.options.system else ()
        return (*system, Message("user", asked))


def read(said: str, options: JudgeOptions) -> float:
    """Read the score that an answer names last. Raises ValueError for one that names none."""
    text = _matched(said, options.pattern)
    if options.choices:
        words = {word.casefold(): score for word, score in options.choices.items()}
        found = re.findall(
            "|".join(rf"(?<!\w){re.escape(word)}(?!\w)" for word in _longest_first(words)), text.casefold()
        )
        if found:
            return words[found[-1]]
        raise ValueError(f"the judge said {said[-200:]!r}, which has none of {', '.join(options.choices)}")
    numbers = [number for number in map(float, _NUMBER.findall(text)) if options.low <= number <= options.high]
    if not numbers:
        raise ValueError(
            f"the judge said {said[-200:]!r}, which has no number from {options.low:g} to {options.high:g}"
        )
    return (numbers[-1] - options.low) / (options.high - options.low)


def expected(log_probs: Mapping[str, float], scores: Mapping[str, float]) -> float:
    """Compute the mean of the scores, each as likely as its choice among them."""
    most = max(log_probs.values())
    weights = {choice: math.exp(log_prob - most) for choice, log_prob in log_probs.items()}
    return sum(weights[choice] * scores[choice] for choice in scores) / sum(weights.values())


def _matched(said: str, pattern: str) -> str:
    if not pattern:
        return said
    found = list(re.finditer(pattern, said))
    if not found:
        raise ValueError(f"the judge said {said[-200:]!r}, which {pattern!r} does not match")
    return found[-1][1] or "" if found[-1].re.groups else found[-1][0]


def _longest_first(words: Mapping[str, float]) -> list[str]:
    """Order choices so that `very good` comes before `good`."""
    return sorted(words, key=len, reverse=True)


def _shown(task: Task) -> str:
    if isinstance(task.prompt, str):
        return task.prompt
    if len(task.prompt) == 1:
        return task.prompt[0].text
    return "\n\n".join(f"{message.role}: {message.text}" for message in task.prompt)
