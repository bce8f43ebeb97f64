# SPDX-License-Identifier: Apache-2.0
"""The reward `maths`: 1 if math-verify finds the response's final expression equal to the answer, else 0."""

from __future__ import annotations

from relax_core.api import Options, Outcome, Reward, Task, Trajectory
from relax_plugin_rewards import expressions
from relax_plugin_rewards.expressions import AnswerFormat


class MathsOptions(Options):
    """Options of `maths`."""

    answer_format: AnswerFormat = "auto"
    """Notation of the column `answer`. `auto`: LaTeX if the answer has LaTeX characters, else a plain expression."""
    boxed_only: bool = False
    """Judge only the content of the response's last `\\boxed{...}`."""
    precision: int = 6
    """Number of decimal places in which answer and gold answer must agree."""
    truncated: bool = False
    """Judge truncated responses too; by default a truncated response scores 0."""


class Maths(Reward[MathsOptions]):
    """A reward of 1 if the final expression of the response equals the answer, else 0."""

    needs_columns = ("answer",)

    def __init__(self, options: MathsOptions | None = None) -> None:
        super().__init__(options)
        expressions.quiet()

    def score(self, task: Task, trajectory: Trajectory) -> float:
        if task.answer is None or not str(task.answer).strip():
            raise ValueError(f"task {task.id} has no answer; give every row of the task file an `answer` column")
        gold = expressions.parse_gold(task.id, str(task.answer).strip(), self.options.answer_format)
        if trajectory.outcome is Outcome.TRUNCATED and not self.options.truncated:
            return 0.0
        response, boxed_only = trajectory.response, self.options.boxed_only
        if boxed_only and "\\boxed" not in response:
            return 0.0
        said = expressions.parse(response, plain=not boxed_only, latex=True)
        return float(expressions.are_equal(gold, said, self.options.precision))
