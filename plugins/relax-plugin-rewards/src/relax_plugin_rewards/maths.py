# SPDX-License-Identifier: Apache-2.0
"""The reward `maths`: 1 if the response's final answer equals the gold answer in value, else 0."""

from __future__ import annotations

from relax_core.api import Gold, Options, Outcome, Reward, Task, Trajectory
from relax_plugin_rewards import expressions
from relax_plugin_rewards.answers import single_gold, unboxed
from relax_plugin_rewards.equality import are_equal
from relax_plugin_rewards.responses import final_answer
from relax_plugin_rewards.values import AnswerFormat, Value, read_gold


class MathsOptions(Options):
    """Options of `maths`."""

    answer_format: AnswerFormat = "auto"
    """Notation of the column `answer`. `auto`: LaTeX and plain expressions; `latex`: words are products of letters;
    `plain`: an answer with LaTeX characters is refused."""
    boxed_only: bool = False
    """Judge only the content of the response's last `\\boxed{...}`."""
    precision: int = 6
    """Number of decimal places in which an answer and a gold answer must agree if one of them has a decimal point. For
    a gold answer below 1, the number of significant digits. Whole numbers and fractions must be equal."""
    truncated: bool = False
    """Judge truncated responses too; by default a truncated response scores 0."""


class Maths(Reward[MathsOptions]):
    """A reward of 1 if the final answer of the response equals the gold answer, else 0."""

    needs_columns = ("answer",)

    def __init__(self, options: MathsOptions | None = None) -> None:
        super().__init__(options)
        expressions.quiet()

    def gold(self, task: Task) -> Gold:
        text = unboxed(single_gold(task))
        plain = () if self.options.boxed_only else (text,)
        return Gold(str(self._gold(task)), (f"\\boxed{{{text}}}", *plain))

    def score(self, task: Task, trajectory: Trajectory) -> float:
        gold = self._gold(task)
        if trajectory.outcome is Outcome.TRUNCATED and not self.options.truncated:
            return 0.0
        said = final_answer(trajectory.response, words=gold.has_words, boxed_only=self.options.boxed_only)
        return float(said is not None and are_equal(gold, said, self.options.precision))

    def _gold(self, task: Task) -> Value:
        return read_gold(task, single_gold(task), self.options.answer_format)
