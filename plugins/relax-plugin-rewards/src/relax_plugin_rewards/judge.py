# SPDX-License-Identifier: Apache-2.0
"""The reward `judge`: a second model rates a response, and the number or choice in the model's answer is the score.

The judge is a pool of `[[engines]]`. Each answer's seed is a hash of the question, so routing, order and restarts don't
change a verdict. After an unreadable answer the question is asked again; after the last retry the sample ends with the
outcome `reward_unreadable`, never with a score of 0.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations
from typing import Any, Literal, TypeVar, cast

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from relax_core.api import Message, Options, Outcome, Reward, Score, Task, Trajectory, Unreadable
from relax_core.api.engine import ModelClient

TEMPLATE = """\
Judge the answer to a question.

Question:
{prompt}

Answer:
{response}

How good is the answer? Think it over, then end with a line of its own that has only a number from {low} to {high}."""
AGAIN = "This can't be read: {error}. Judge the same answer again, and end as you were asked to."
"""Message to the judge after an unreadable answer."""
VERDICTS = "verdicts"
"""Prefix of the names of score parts that describe verdicts. These parts are logged, and are not rewards."""
T = TypeVar("T")
_PLACE = re.compile(r"\{(\w+)\}")
_OBJECT = re.compile(r'\{(?=\s*")')
"""The beginning of a JSON object with a key."""
_MOST_BROKEN = 1000
"""Number of broken JSON objects after which the rest of an answer is not read: each one may cost a pass over the answer."""
_NUMBER = re.compile(r"(?<![\w.])[+-]?\d+(?:\.\d+)?(?![\w])")


class AskOptions(Options):
    """Options of every reward that asks a judge."""

    engine: str = "judge"
    """Name of the pool in `[[engines]]` that serves the judge."""
    system: str = ""
    """System message for the judge; empty: no system message."""
    chat: bool = True
    """True: apply the judge's chat template; False: send the plain text, for models without a chat template."""
    retries: NonNegativeInt = 1
    """Number of further requests after an unreadable answer. If all are unreadable, the sample's outcome is
    `reward_unreadable`."""
    max_new_tokens: PositiveInt = 512
    """Maximum number of tokens in the judge's answer."""
    temperature: float = Field(0.0, ge=0.0)
    """Temperature of the judge. 0: greedy decoding; above 0: sampling, with a seed from pool, question and vote number."""
    truncated: bool = False
    """Judge truncated responses too; by default a truncated response scores 0."""


class JudgeOptions(AskOptions):
    """Options of `judge`."""

    template: str = TEMPLATE
    """Text of the question to the judge. `{prompt}`, `{response}`, `{low}`, `{high}` and columns of the task file, such
    as `{answer}` or `{rubric}`, are filled in."""
    low: float = 0.0
    """Lowest number that the judge may give; it scores 0. Lower numbers are not accepted."""
    high: float = 10.0
    """Highest number that the judge may give; it scores 1. Higher numbers are not accepted."""
    choices: dict[str, float] = {}
    """Words that the judge may answer instead of a number, with their scores, such as `{yes = 1.0, no = 0.0}`."""
    read: Literal["text", "log-probs"] = "text"
    """Source of the score. `text`: the last number or choice in the judge's answer; `log-probs`: the mean score of the
    choices, weighted by the probability that each choice is the judge's whole answer."""
    keys: dict[str, float] = {}
    """Keys of the JSON object in the judge's answer, with their weights in the score: `{correct = 2.0, clear = 1.0}`.
    Each key holds a number from `low` to `high` and is logged as `reward/<reward>/verdicts/<key>`."""
    votes: PositiveInt = 1
    """Number of independent verdicts on each sample, of which at least half must be readable. The agreement of verdicts
    is logged (`reward/<reward>/verdicts/agreement` and more)."""
    combine: Literal["mean", "majority"] = "mean"
    """Score from several verdicts. `mean`: their mean; `majority`: the most frequent score (the mean of tied scores)."""
    pattern: str = ""
    """Regular expression for the part of the answer to read, such as `Score: (\\d+)`: the last match counts, or its
    first group. Empty: the whole answer."""

    @model_validator(mode="after")
    def _readable(self) -> JudgeOptions:
        if self.read == "log-probs" and len(self.choices) < 2:
            raise ValueError('read = "log-probs" compares choices; give two or more in choices')
        if self.choices and not all(map(math.isfinite, self.choices.values())):
            raise ValueError("the scores in choices must be finite numbers")
        if self.keys and (self.choices or self.read != "text"):
            raise ValueError("keys are read from a JSON object in the text; remove choices and read, or remove keys")
        if self.keys and not (all(0 <= weight < math.inf for weight in self.keys.values()) and any(self.keys.values())):
            raise ValueError("the weights in keys must be finite, not negative, and not all zero")
        if self.votes > 1 and (self.read != "text" or not self.temperature):
            raise ValueError('several votes need sampled answers; set temperature above 0 and read = "text"')
        if self.combine != "mean" and self.votes == 1:
            raise ValueError("combine has no effect with votes = 1; raise votes, or remove combine")
        if not self.low < self.high:
            raise ValueError(f"low: got {self.low:g}; it must be less than high, which is {self.high:g}")
        check_pattern(self.pattern)
        return self


class Asking:
    """Requests to the judge's pool, for a reward with `AskOptions`."""

    options: Any
    engines: Mapping[str, ModelClient]

    async def ask(self, asked: str, number: int, read: Callable[[str], tuple[float, Mapping[str, float]]]) -> Vote:
        """Request a verdict; while the answer can't be read, ask again, up to `retries` times.

        `number`: number of the vote on this question. `read`: returns the score and its parts, or raises ValueError.
        """
        options: AskOptions = self.options
        client = self.engines[options.engine]
        said, error = "", ""
        for attempt in range(options.retries + 1):
            seed = verdict_seed(options.engine, options.system, asked, number, attempt)
            prompt = self._prompt(asked, said, error) if attempt else self._prompt(asked)
            try:
                answer = await client.generate(
                    prompt, options.max_new_tokens, temperature=options.temperature, seed=seed
                )
            except ValueError:
                if not attempt:
                    raise
                break  # with the unreadable answer appended, the prompt is too long for the judge
            said = answer.text
            try:
                value, parts = read(said)
                return Vote(value, parts, attempt)
            except ValueError as unread:
                error = str(unread)
        return Vote(math.nan, {}, attempt + 1, error)

    async def expected(self, asked: str, scores: Mapping[str, float]) -> float:
        """Return the mean of choices' scores, weighted by the probability that each is the judge's whole answer."""
        prompt = self._messages(asked) if self.options.chat else asked
        found = await self.engines[self.options.engine].score(prompt, list(scores))
        return expected(dict(zip(scores, map(sum, found), strict=True)), scores)

    def _prompt(self, asked: str, said: str = "", error: str = "") -> tuple[Message, ...] | str:
        again = AGAIN.replace("{error}", error) if error else ""
        if not self.options.chat:
            return f"{asked}{said}\n\n{again}\n\n" if error else asked
        first = self._messages(asked)
        return (*first, Message("assistant", said), Message("user", again)) if error else first

    def _messages(self, asked: str) -> tuple[Message, ...]:
        system = (Message("system", self.options.system),) if self.options.system else ()
        return (*system, Message("user", asked))


class Judge(Reward[JudgeOptions], Asking):
    """A reward from another model's verdict on the response: from 0 to 1, or the score of the chosen word."""

    def __init__(self, options: JudgeOptions | None = None) -> None:
        super().__init__(options)
        self.needs_engines = (self.options.engine,)

    async def score(self, task: Task, trajectory: Trajectory) -> float | Score:
        if trajectory.outcome is Outcome.TRUNCATED and not self.options.truncated:
            return 0.0
        asked = self.question(task, trajectory.response)
        options = self.options
        if options.read == "log-probs":
            return await self.expected(asked, options.choices)
        reader = partial(verdict, options=options)
        votes = await start_all(self.ask(asked, number, reader) for number in range(options.votes))
        return combined(votes, options)

    def question(self, task: Task, response: str) -> str:
        own = {"response": response, "low": f"{self.options.low:g}", "high": f"{self.options.high:g}"}
        return filled(self.options.template, task, own)


@dataclass(frozen=True, slots=True)
class Vote:
    """One verdict of the judge on a sample."""

    value: float
    """Score of the verdict; NaN if no answer could be read."""
    parts: Mapping[str, float] = field(default_factory=dict)
    unread: int = 0
    """Number of unreadable answers before this verdict; if the vote is unreadable, of all its answers."""
    error: str = ""

    @property
    def readable(self) -> bool:
        return not math.isnan(self.value)


def verdict_seed(pool: str, system: str, asked: str, vote: int, attempt: int) -> int:
    """Return the seed of one answer: a hash of pool name, system message, question, vote number and attempt number.

    The engine pool also mixes its model's folder into the seed.
    """
    content = json.dumps([pool, system, asked, vote, attempt]).encode()
    return int.from_bytes(hashlib.blake2b(content, digest_size=4).digest(), "big") >> 1


def filled(template: str, task: Task, own: Mapping[str, str]) -> str:
    """Return a template filled with `own` texts, `{prompt}`, and columns of the task.

    It is filled in one pass, so braces in a response are not replaced. Raises ValueError for an unknown column.
    """
    own = {"prompt": _shown(task), **own}

    def text(place: re.Match[str]) -> str:
        name = place[1]
        value = own.get(name, task.column(name))
        if value is None:
            raise ValueError(f"task {task.id} has no column {name!r}, which the judge's template names; add the column")
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)

    return _PLACE.sub(text, template)


async def start_all(requests: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run requests at the same time; when all have ended, return their results or raise the first error."""
    found = await asyncio.gather(*requests, return_exceptions=True)
    for failed in found:
        if isinstance(failed, BaseException):
            raise failed
    return cast(list[T], found)


def combined(votes: Sequence[Vote], options: JudgeOptions) -> Score:
    """Combine the votes on a sample into a score. Raises Unreadable if more than half of the votes are unreadable."""
    read_ones = [vote for vote in votes if vote.readable]
    answers = sum(vote.unread + vote.readable for vote in votes)
    unreadable = {f"{VERDICTS}/unreadable": sum(vote.unread for vote in votes) / max(answers, 1)}
    if not read_ones or 2 * len(read_ones) < len(votes):
        error = next(vote.error for vote in votes if not vote.readable)
        raise Unreadable(f"{len(votes) - len(read_ones)} of {len(votes)} verdicts can't be read: {error}", unreadable)
    values = [vote.value for vote in read_ones]
    value = sum(values) / len(values)
    if options.combine == "majority":
        counts = Counter(values)
        most = [one for one, count in counts.items() if count == max(counts.values())]
        value = sum(most) / len(most)
    parts = dict(unreadable)
    if options.votes > 1:
        parts |= {f"{VERDICTS}/{name}": figure for name, figure in agreement(values).items()}
    for key in options.keys:
        parts[f"{VERDICTS}/{key}"] = sum(vote.parts[key] for vote in read_ones) / len(read_ones)
    return Score(value, parts)


def agreement(values: Sequence[float]) -> dict[str, float]:
    """Return statistics of the votes on one sample.

    `unanimous`: 1 if all votes are equal, else 0. `agreement`: share of equal pairs of votes. `variance`: of the votes.
    """
    pairs = list(combinations(values, 2))
    equal = sum(math.isclose(one, other, abs_tol=1e-9) for one, other in pairs)
    mean = sum(values) / len(values)
    return {
        "unanimous": float(equal == len(pairs)),
        "agreement": equal / len(pairs) if pairs else 1.0,
        "variance": sum((value - mean) ** 2 for value in values) / len(values),
    }


def verdict(said: str, options: JudgeOptions) -> tuple[float, dict[str, float]]:
    """Return an answer's score, and the score of each key of `keys`. Raises ValueError if the answer can't be read."""
    if not options.keys:
        return read(said, options), {}
    text = matched(said, options.pattern)
    found = [one for one in _objects(text) if all(key in one for key in options.keys)]
    if not found:
        raise ValueError(f"the judge said {said[-200:]!r}, which has no JSON object with {', '.join(options.keys)}")
    parts: dict[str, float] = {}
    for key in options.keys:
        number = found[-1][key]
        if isinstance(number, bool) or not isinstance(number, int | float) or not options.low <= number <= options.high:
            raise ValueError(
                f"the judge said {key} = {str(number)[:80]}, not a number from {options.low:g} to {options.high:g}"
            )
        parts[key] = (number - options.low) / (options.high - options.low)
    weights = options.keys
    return sum(weights[key] * part for key, part in parts.items()) / sum(weights.values()), parts


def _objects(text: str) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects in a text, without empty objects and without objects inside of objects."""
    decoder, at, left = json.JSONDecoder(), 0, _MOST_BROKEN
    while left and (begin := _OBJECT.search(text, at)):
        try:
            found, at = decoder.raw_decode(text, begin.start())
            yield found
        except ValueError:
            at, left = begin.end(), left - 1
        except RecursionError:  # raised at each of the objects within, too
            return


def read(said: str, options: JudgeOptions) -> float:
    """Return the score of the last number or choice in an answer. Raises ValueError if the answer has neither."""
    text = matched(said, options.pattern)
    if options.choices:
        return chosen(text, said, options.choices)
    numbers = [number for number in map(float, _NUMBER.findall(text)) if options.low <= number <= options.high]
    if not numbers:
        raise ValueError(
            f"the judge said {said[-200:]!r}, which has no number from {options.low:g} to {options.high:g}"
        )
    return (numbers[-1] - options.low) / (options.high - options.low)


def expected(log_probs: Mapping[str, float], scores: Mapping[str, float]) -> float:
    """Return the mean score, weighted by the choices' probabilities after normalising these to sum to 1."""
    most = max(log_probs.values())
    weights = {choice: math.exp(log_prob - most) for choice, log_prob in log_probs.items()}
    return sum(weights[choice] * scores[choice] for choice in scores) / sum(weights.values())


def chosen(text: str, said: str, choices: Mapping[str, float]) -> float:
    """Return the score of the last choice in `text`, a part of the answer `said`. Raises ValueError if it has none."""
    words = {word.casefold(): score for word, score in choices.items()}
    longest_first = sorted(words, key=len, reverse=True)  # `very good` is matched before `good`
    found = re.findall("|".join(rf"(?<!\w){re.escape(word)}(?!\w)" for word in longest_first), text.casefold())
    if found:
        return words[found[-1]]
    raise ValueError(f"the judge said {said[-200:]!r}, which has none of {', '.join(choices)}")


def check_pattern(pattern: str) -> None:
    """Raise ValueError if an option `pattern` is not a regular expression."""
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"pattern is not a valid regular expression: {error}") from None


def matched(said: str, pattern: str) -> str:
    """Return the last match of `pattern` in an answer, or its first group; the whole answer for an empty pattern.

    Raises ValueError if the pattern does not match.
    """
    if not pattern:
        return said
    found = list(re.finditer(pattern, said))
    if not found:
        raise ValueError(f"the judge said {said[-200:]!r}, which {pattern!r} does not match")
    return found[-1][1] or "" if found[-1].re.groups else found[-1][0]


def _shown(task: Task) -> str:
    if isinstance(task.prompt, str):
        return task.prompt
    if len(task.prompt) == 1:
        return task.prompt[0].text
    return "\n\n".join(f"{message.role}: {message.text}" for message in task.prompt)
