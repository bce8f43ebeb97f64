# SPDX-License-Identifier: Apache-2.0
"""The reward of DeepScaleR: 1 if the last box after `</think>` holds one of the gold answers."""

from __future__ import annotations

from relax_core.api import Options, Outcome, Reward, Task, Trajectory
from relax_plugin_rewards import expressions
from relax_plugin_rewards.answers import Think, after_thinking, gold_texts, last_box


class DeepScalerOptions(Options):
    """Options of `deepscaler`."""

    think: Think = "optional"
    """`optional`: only text after the last `</think>`, if there is one, is judged; `required`: a response without
    `</think>` scores 0; `ignored`: a box before `</think>` counts too."""
    precision: int = 6
    """Decimal digits to which numbers must agree."""
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
