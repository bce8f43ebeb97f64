# SPDX-License-Identifier: Apache-2.0
"""The reward of DeepScaleR: 1 if the last box after `</think>` contains a gold answer, else 0."""

from __future__ import annotations

from relax_core.api import Options, Outcome, Reward, Task, Trajectory
from relax_plugin_rewards import expressions
from relax_plugin_rewards.answers import Think, after_thinking, gold_texts, last_box


class DeepScalerOptions(Options):
    """Options of `deepscaler`."""

    think: Think = "optional"
    """Judged part of a response. `optional`: the text after the last `</think>`, or all if it has no `</think>`;
    `required`: the same, but a response without `</think>` scores 0; `ignored`: the whole response."""
    precision: int = 6
    """Number of decimal places in which answer and gold answer must agree."""
    truncated: bool = False
    """Judge truncated responses too; by default a truncated response scores 0."""


class DeepScaler(Reward[DeepScalerOptions]):
    r"""A reward of 1 if the last `\boxed{...}` or `\fbox{...}` equals one of the gold answers, else 0."""

    needs_columns = ("answer",)

    def __init__(self, options: DeepScalerOptions | None = None) -> None:
        super().__init__(options)
        expressions.quiet()

    def score(self, task: Task, trajectory: Trajectory) -> float:
        golds = [last_box(gold) or gold for gold in gold_texts(task)]
        if trajectory.outcome is Outcome.TRUNCATED and not self.options.truncated:
            return 0.0
        answer = last_box(after_thinking(trajectory.response, self.options.think))
        return float(any(expressions.states(answer, gold, self.options.precision) for gold in golds))
