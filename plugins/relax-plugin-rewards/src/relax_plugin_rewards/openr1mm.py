# SPDX-License-Identifier: Apache-2.0
"""The reward of multimodal Open-R1: thought and answer in tags, the answer right; both are parts of the score."""

from __future__ import annotations

from pydantic import Field

from relax_core.api import Options, Outcome, Reward, Score, Task, Trajectory
from relax_plugin_rewards import expressions
from relax_plugin_rewards.answers import gold_texts, last_box, last_tagged

TAGS = ("<think>", "</think>", "<answer>", "</answer>")


class OpenR1MMOptions(Options):
    """Options of `openr1mm`."""

    format_weight: float = Field(0.5, ge=0.0, le=1.0)
    """Share of the score that the format earns by itself; the rest is for the right answer."""
    precision: int = 6
    """Decimal digits to which numbers must agree."""
    truncated: bool = False
    """Judge a response that a limit cut off; otherwise it scores 0: finishing is part of the task."""


class OpenR1MM(Reward[OpenR1MMOptions]):
    """Gives from 0 to 1 for `<think>...</think><answer>...</answer>` and for a right answer in it."""

    needs_columns = ("answer",)

    def __init__(self, options: OpenR1MMOptions | None = None) -> None:
        super().__init__(options)
        expressions.quiet()

    def score(self, task: Task, trajectory: Trajectory) -> Score:
        golds = [last_tagged(gold, "answer") or gold for gold in gold_texts(task)]
        if trajectory.outcome is Outcome.TRUNCATED and not self.options.truncated:
            return Score(0.0, {"accuracy": 0.0, "format": 0.0})
        response = trajectory.response
        answer = (
            last_tagged(response, "answer") if response.count("<answer>") == response.count("</answer>") == 1 else ""
        )
        answer = last_box(answer) or answer
        accuracy = float(any(expressions.states(answer, gold, self.options.precision) for gold in golds))
        well_formed = float(is_well_formed(response))
        weight = self.options.format_weight
        return Score((1 - weight) * accuracy + weight * well_formed, {"accuracy": accuracy, "format": well_formed})


def is_well_formed(response: str) -> bool:
    """Tell whether the response is one thought in tags, one answer in tags, neither of them empty, and nothing else."""
    before, _, rest = response.partition("<think>")
    thought, _, rest = rest.partition("</think>")
    between, _, rest = rest.partition("<answer>")
    answer, _, after = rest.partition("</answer>")
    alone = not (before + between + after).strip()
    return alone and bool(thought.strip() and answer.strip()) and all(response.count(tag) == 1 for tag in TAGS)
