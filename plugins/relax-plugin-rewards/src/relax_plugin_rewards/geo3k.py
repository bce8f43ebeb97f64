# SPDX-License-Identifier: Apache-2.0
"""The reward of Geometry3K: scores a boxed length or angle near the gold answer, and the use of `<think>` tags."""

from __future__ import annotations

import re
from fractions import Fraction

from pydantic import Field

from relax_core.api import Gold, Options, Outcome, Reward, Score, Task, Trajectory
from relax_plugin_rewards import expressions
from relax_plugin_rewards.answers import after_thinking, gold_texts, last_box, unboxed
from relax_plugin_rewards.equality import are_equal
from relax_plugin_rewards.values import Unread, Value, read, read_gold

_UNIT = re.compile(
    r"([\d)}.])\s*+(?:\^\s*\{?\s*\\circ\s*\}?|°|\\degrees?|degrees?|(?:(?:square|sq)\s*+)?(?:units?|mm|cm|m|km|in|ft|yd|inches|feet|meters?))"
    r"(?:\s*\^\s*\{?[23]\}?|[²³])?\s*$"
)


class Geo3kOptions(Options):
    """Options of `geo3k`."""

    tolerance: float = Field(1e-3, ge=0.0, lt=1.0)
    """Maximum difference from the gold number, as a fraction of the gold number; integers must be equal."""
    format_weight: float = Field(0.1, ge=0.0, le=1.0)
    """Part of the score for the format (`<think>...</think>`, then a box); the remaining part is for a right answer."""
    truncated: bool = False
    """Judge truncated responses too; by default a truncated response scores 0."""


class Geo3k(Reward[Geo3kOptions]):
    """A reward from 0 to 1 for a right number or expression in the last box, and for `<think>...</think>` before it."""

    needs_columns = ("answer",)

    def __init__(self, options: Geo3kOptions | None = None) -> None:
        super().__init__(options)
        expressions.quiet()

    def gold(self, task: Task) -> Gold:
        shown = " or ".join(map(str, self._golds(task)))
        return Gold(shown, tuple(f"<think>so</think>\\boxed{{{unboxed(gold)}}}" for gold in gold_texts(task)))

    def score(self, task: Task, trajectory: Trajectory) -> Score:
        golds = self._golds(task)
        if trajectory.outcome is Outcome.TRUNCATED and not self.options.truncated:
            return Score(0.0, {"accuracy": 0.0, "format": 0.0})
        response = trajectory.response
        answer = _bare(last_box(after_thinking(response, "optional")))
        accuracy = float(any(self._is_near(answer, gold) for gold in golds))
        thought = (
            response.strip().startswith("<think>") and response.count("<think>") == response.count("</think>") == 1
        )
        well_formed = float(thought and bool(answer))
        weight = self.options.format_weight
        return Score((1 - weight) * accuracy + weight * well_formed, {"accuracy": accuracy, "format": well_formed})

    def _golds(self, task: Task) -> list[Value]:
        """Read the gold answers. Raises ValueError naming the task for an answer in words."""
        golds = [read_gold(task, _bare(unboxed(gold))) for gold in gold_texts(task)]
        for gold in golds:
            if gold.kind == "text":
                reason = "is not a mathematical expression; correct the answer column"
                raise ValueError(f"task {task.id}: answer {gold.source!r} {reason}")
        return golds

    def _is_near(self, answer: str, gold: Value) -> bool:
        try:
            said = read(answer)
        except Unread:
            return False
        if are_equal(gold, said):
            return True
        if {gold.kind, said.kind} - {"number", "expression"} or "%" in (gold.unit, said.unit):
            return False
        wanted, found = expressions.number(gold.number), expressions.number(said.number)
        if wanted is None or found is None or any(wanted[1:] + found[1:]):
            return False
        if wanted[0].denominator == found[0].denominator == 1:
            return False
        return abs(found[0] - wanted[0]) <= Fraction(self.options.tolerance) * abs(wanted[0])


def _bare(answer: str) -> str:
    """Return the answer without the unit after its number; each task has lengths of one unit, so units are ignored."""
    return _UNIT.sub(r"\1", re.sub(r"\\(?:text|mathrm)\s*\{([^{}]*)\}", r"\1", answer)).strip()
