# SPDX-License-Identifier: Apache-2.0
"""The reward of DAPO: compares the last `Answer: ...` line, normalised as in Minerva, with the gold answer.

This reward does not include DAPO's penalty for long responses.
"""

from __future__ import annotations

import re
from fractions import Fraction

from pydantic import PositiveInt, model_validator

from relax_core.api import Gold, Options, Outcome, Reward, Score, Task, Trajectory
from relax_plugin_rewards.answers import gold_texts, last_box, unboxed

_STATED = re.compile(r"(?i)\banswer\**\s*:(?:[ \t*]*\n)?(.*)")
_ARTICLE = re.compile(r"(?i)(?:an|a|the)\s+")
_UNIT = re.compile(
    r"(?i)(?<=[\d)}])\s*+(?:(?:square|sq|cubic)\s*+)?(?:units?|ways|integers?|dollars?|euros?|cents?|mph|inch(?:es)?|feet|foot|ft|"
    r"hours?|minutes?|seconds?|days?|weeks?|months?|years?|degrees?|km|cm|mm|gm|meters?|metres?|miles?|pounds?|points?|"
    r"students?|people|digits?|edges?|multiples?|meals?)\.?$"
)
_WRAPPED = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox|boldsymbol)\s*\{([^{}]*)\}")
_SIGNS = {
    "\\left": "", "\\right": "", "\\!": "", "\\,": " ", "\\;": " ", "\\ ": " ", "{,}": ",", "\\$": "", "$": "", "\\%": "%",
    "^\\circ": "", "^{\\circ}": "", "°": "", "\\dfrac": "\\frac", "\\tfrac": "\\frac", "\u2212": "-", "**": "", '"': "",
}  # fmt: skip
_NAMED = re.compile(r"^[^=<>!,;]*=(?=[^=<>!]*$)")
"""The left side of the only equals sign, as in `x = 7`; `x = 1, y = 2` states two values and stays whole."""
_GROUPED = re.compile(r"[+-]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
_NUMBER = r"\d{1,400}(?:\.\d{0,400})?|\.\d{1,400}"
_RATIONAL = re.compile(
    rf"([+-]?)(?:({_NUMBER})(?:/({_NUMBER}))?|\\frac\{{?(-?\d{{1,400}}?)\}}?\{{?(-?\d{{1,400}})\}}?)(%?)"
)


class DapoOptions(Options):
    """Options of `dapo`."""

    right: float = 1.0
    """Score of a response with a right answer."""
    wrong: float = -1.0
    """Score of a response with a wrong answer or no answer and, by default, of a truncated response."""
    strict_box: bool = False
    """Read the answer from the last `\\boxed{...}` instead of `Answer:`, and accept only the exact text of a gold answer,
    or an equal number."""
    tail: PositiveInt = 300
    """Number of characters at the response's end that are searched for an answer."""
    truncated: bool = False
    """Judge truncated responses too; by default a truncated response scores `wrong`."""

    @model_validator(mode="after")
    def _ordered(self) -> DapoOptions:
        if not self.wrong < self.right:
            raise ValueError(f"wrong: got {self.wrong:g}; it must be less than right, which is {self.right:g}")
        return self


class Dapo(Reward[DapoOptions]):
    """A reward of `right` if the response's last `Answer:` is a gold answer, else `wrong`."""

    needs_columns = ("answer",)

    def gold(self, task: Task) -> Gold:
        golds = self._golds(task)
        form = "\\boxed{{{}}}" if self.options.strict_box else "Answer: {}"
        return Gold(" or ".join(map(repr, golds)), tuple(map(form.format, golds)), self.options.right)

    def score(self, task: Task, trajectory: Trajectory) -> Score:
        golds = self._golds(task)
        right = False
        if trajectory.outcome is not Outcome.TRUNCATED or self.options.truncated:
            tail = trajectory.response[-self.options.tail :]
            if self.options.strict_box:
                answer = last_box(tail)
                right = any(answer == gold or _same_number(answer, gold) for gold in golds)
            else:
                answer = normalised(stated_answer(tail))
                right = bool(answer) and any(same(answer, normalised(gold) or gold) for gold in golds)
        return Score(self.options.right if right else self.options.wrong, {"accuracy": float(right)})

    def _golds(self, task: Task) -> list[str]:
        """Return the gold answers without their boxes. Raises ValueError for a box with text around it."""
        golds = [unboxed(gold) for gold in gold_texts(task)]
        for gold in golds:
            if last_box(gold):
                fix = "write the content of the box alone in the answer column"
                raise ValueError(f"task {task.id}: answer {gold!r} has text around its box; {fix}")
        return golds


def stated_answer(text: str) -> str:
    """Return the last stated answer; empty without an answer, or if consecutive lines state different answers."""
    stated = list(_STATED.finditer(text))
    if not stated:
        return ""
    said = stated[-1][1]
    for earlier, later in zip(reversed(stated[:-1]), reversed(stated[1:]), strict=True):
        if text[earlier.end() : later.start()].strip(" \t\n*-") or re.search(r"[.!?]\s+\w", earlier[1]):
            break  # words between two answers are a change of mind, so only the last answer counts
        if not same(normalised(earlier[1]), normalised(said)):
            return ""
    return said


def normalised(answer: str) -> str:
    """Return an answer in normal form: without box, math delimiters, unit, article and thousands separators."""
    text = last_box(answer) or answer
    text = text.replace("\\(", "").replace("\\)", "").replace("\\[", "").replace("\\]", "")
    for sign, plain in _SIGNS.items():
        text = text.replace(sign, plain)
    text = _WRAPPED.sub(r" \1 ", text).strip().rstrip(".").strip()
    text = _NAMED.sub("", text)
    text = _ARTICLE.sub("", text.strip(), count=1) if _ARTICLE.match(text.strip()) else text.strip()
    text = _UNIT.sub("", text).strip()
    text = re.sub(r"\\sqrt(\d)", r"\\sqrt{\1}", re.sub(r"\\frac(\d)(\d)", r"\\frac{\1}{\2}", text))
    text = re.sub(r"\s+", "", text)
    return text.replace(",", "") if _GROUPED.fullmatch(text) else text


def same(answer: str, gold: str) -> bool:
    """Return True if two normalised answers are equal as rational numbers or as text."""
    return answer == gold or _same_number(answer, gold)


def rational(text: str) -> Fraction | None:
    """Return the exact value of an integer, decimal, fraction or percentage; None for any different text."""
    found = _RATIONAL.fullmatch(text)
    if found is None:
        return None
    sign, plain, below, above, under, percent = found.groups()
    upper, lower = (plain, below or "1") if plain else (above, under)
    if not Fraction(lower):
        return None
    value = Fraction(upper) / Fraction(lower) / (100 if percent else 1)
    return -value if sign == "-" else value


def _same_number(answer: str, gold: str) -> bool:
    value = rational(answer)
    return value is not None and value == rational(gold)
