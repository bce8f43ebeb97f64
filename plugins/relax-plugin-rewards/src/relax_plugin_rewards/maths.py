# SPDX-License-Identifier: Apache-2.0
"""Mathematics: the final expression of the response is equal to the answer, as judged by math-verify.

The library's own timeouts use signals, which only a main thread may set: they are off, and the killable process that
rewards run in bounds the time instead.
"""

from __future__ import annotations

import logging
import re
from functools import lru_cache
from typing import Any, Literal

from relax_core.api import Options, Outcome, Reward, Task, Trajectory


class MathsOptions(Options):
    """Options of `maths`."""

    answer_format: Literal["auto", "latex", "plain"] = "auto"
    """Notation of the answer column; auto reads LaTeX where it has its signs, else a plain expression."""
    boxed_only: bool = False
    """Only what stands in the response's last \\boxed{...} counts."""
    precision: int = 6
    """Decimal digits to which numbers must agree."""
    truncated: bool = False
    """Judge a response that a limit cut off; otherwise it scores 0: finishing is part of the task."""


_SCIENTIFIC = re.compile(r"([+-]?\d+(?:\.\d+)?)[eE]([+-]?\d+)")
_WORD = re.compile(r"[A-Za-z]{3,}(?![A-Za-z(])")
"""A word that no function call is: prose, which LaTeX would read as a product of letters."""


class Maths(Reward[MathsOptions]):
    """Gives 1 when the final expression of the response equals the answer, else 0."""

    needs_columns = ("answer",)

    def __init__(self, options: MathsOptions | None = None) -> None:
        super().__init__(options)
        logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its timeouts are off, which is meant

    def score(self, task: Task, trajectory: Trajectory) -> float:
        if task.answer is None or not str(task.answer).strip():
            raise ValueError(f"task {task.id} has no answer; give every row of the task file an `answer` column")
        gold = gold_answer(task.id, str(task.answer).strip(), self.options.answer_format)
        if trajectory.outcome is Outcome.TRUNCATED and not self.options.truncated:
            return 0.0
        return float(agrees(gold, trajectory.response, self.options.boxed_only, self.options.precision))


def agrees(gold: tuple[Any, ...], response: str, boxed_only: bool = False, precision: int = 6) -> bool:
    """Tell whether a response's final expression equals parsed gold; one that has none does not."""
    from math_verify import verify

    if boxed_only and "\\boxed" not in response:
        return False
    said = _parse(response, plain=not boxed_only, latex=True)
    return bool(said) and bool(verify(list(gold), said, float_rounding=precision, timeout_seconds=None))


@lru_cache(maxsize=4096)
def gold_answer(task_id: str, answer: str, answer_format: str) -> tuple[Any, ...]:
    """Read the answer column as expressions; parsed once for all samples of a task."""
    parsed: list[Any] = []
    if answer_format != "latex" and not _has_latex(answer):
        scientific = _SCIENTIFIC.fullmatch(answer)
        plain = f"{scientific[1]}*10**({scientific[2]})" if scientific else answer
        parsed = _parse(plain, plain=True, latex=False)
    if not parsed and (
        answer_format == "latex" or (answer_format == "auto" and (_has_latex(answer) or not _WORD.search(answer)))
    ):
        delimited = "$" in answer or "\\boxed" in answer or "\\(" in answer
        parsed = _parse(answer if delimited else f"${answer}$", plain=False, latex=True)
    if all(isinstance(one, str) for one in parsed):
        raise ValueError(f"task {task_id}: answer {answer!r} is no mathematical expression; correct the answer column")
    return tuple(parsed)


def _parse(text: str, *, plain: bool, latex: bool) -> list[Any]:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    configs = [LatexExtractionConfig(boxed_match_priority=0)] if latex else []
    return list(parse(text, [*configs, *([ExprExtractionConfig()] if plain else [])], parsing_timeout=None))


def _has_latex(answer: str) -> bool:
    return any(sign in answer for sign in "\\^{$_")
