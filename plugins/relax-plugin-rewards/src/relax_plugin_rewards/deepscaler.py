# SPDX-License-Identifier: Apache-2.0
"""The reward of DeepScaleR: 1 if the last box after `</think>` contains a gold answer, else 0."""

from __future__ import annotations

from relax_core.api import Gold, Options, Outcome, Reward, Task, Trajectory
from relax_plugin_rewards import expressions
from relax_plugin_rewards.answers import Think, after_thinking, gold_texts, last_box, unboxed
from relax_plugin_rewards.equality import states
from relax_plugin_rewards.values import Value, read_gold


class DeepScalerOptions(Options):
    """Options of `deepscaler`."""

    think: Think = "optional"
    """Judged part of a response. `optional`: the text after the last `</think>`, or all if it has no `</think>`;
    `required`: the same, but a response without `</think>` scores 0; `ignored`: the whole response."""
    precision: int = 6
    """Number of decimal places in which an answer and a gold answer must agree if one of them has a decimal point. For
    a gold answer below 1, the number of significant digits. Whole numbers and fractions must be equal."""
    truncated: bool = False
    """Judge truncated responses too; by default a truncated response scores 0."""


class DeepScaler(Reward[DeepScalerOptions]):
    r"""A reward of 1 if the last `\boxed{...}` or `\fbox{...}` equals one of the gold answers, else 0."""

    needs_columns = ("answer",)

    def __init__(self, options: DeepScalerOptions | None = None) -> None:
        super().__init__(options)
        expressions.quiet()

    def gold(self, task: Task) -> Gold:
        thought = "<think>so</think>" if self.options.think == "required" else ""
        return Gold(
            " or ".join(map(str, self._golds(task))),
            tuple(f"{thought}\\boxed{{{unboxed(gold)}}}" for gold in gold_texts(task)),
        )

    def score(self, task: Task, trajectory: Trajectory) -> float:
        golds = self._golds(task)
        if trajectory.outcome is Outcome.TRUNCATED and not self.options.truncated:
            return 0.0
        answer = last_box(after_thinking(trajectory.response, self.options.think))
        return float(any(states(answer, gold, self.options.precision) for gold in golds))

    def _golds(self, task: Task) -> list[Value]:
        return [read_gold(task, gold, words=True) for gold in gold_texts(task)]
