# SPDX-License-Identifier: Apache-2.0
"""The reward of DeepScaleR: the last box after the thought holds one of the gold answers."""

from __future__ import annotations

from relax_core.api import Options, Outcome, Reward, Task, Trajectory
from relax_plugin_rewards import expressions
from relax_plugin_rewards.answers import Think, after_thinking, gold_texts, last_box


class DeepScalerOptions(Options):
    """Options of `deepscaler`."""

    think: Think = "optional"
    """`optional`: the answer follows the last `</think>` where there is one; `required`: there must be one; `ignored`: a
    box in the thought counts too."""
    precision: int = 6
    """Decimal digits to which numbers must agree."""
    truncated: bool = False
    """Judge a response that a limit cut off; otherwise it scores 0: finishing is part of the task."""


class DeepScaler(Reward[DeepScalerOptions]):
    """Gives 1 when the last `\\boxed{...}` or `\\fbox{...}` equals one of the gold answers, else 0."""

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
