# SPDX-License-Identifier: Apache-2.0
"""The reward of multimodal Open-R1: one part of the score is for the format in tags, the rest for a right answer."""

from __future__ import annotations

from pydantic import Field

from relax_core.api import Gold, Options, Outcome, Reward, Score, Task, Trajectory
from relax_plugin_rewards import expressions
from relax_plugin_rewards.answers import gold_texts, last_tagged, unboxed, untagged
from relax_plugin_rewards.equality import states
from relax_plugin_rewards.values import read_gold

TAGS = ("<think>", "</think>", "<answer>", "</answer>")


class OpenR1MMOptions(Options):
    """Options of `openr1mm`."""

    format_weight: float = Field(0.5, ge=0.0, le=1.0)
    """Part of the score for the format in tags; the remaining part is for a right answer."""
    precision: int = 6
    """Number of decimal places in which an answer and a gold answer must agree if one of them has a decimal point. For
    a gold answer below 1, the number of significant digits. Whole numbers and fractions must be equal."""
    truncated: bool = False
    """Judge truncated responses too; by default a truncated response scores 0."""


class OpenR1MM(Reward[OpenR1MMOptions]):
    """A reward from 0 to 1 for the format `<think>...</think><answer>...</answer>` and a right answer in the tags."""

    needs_columns = ("answer",)

    def __init__(self, options: OpenR1MMOptions | None = None) -> None:
        super().__init__(options)
        expressions.quiet()

    def gold(self, task: Task) -> Gold:
        texts = [untagged(gold, "answer") for gold in gold_texts(task)]
        read = " or ".join(str(read_gold(task, text, words=True)) for text in texts)
        return Gold(read, tuple(f"<think>so</think><answer>{text}</answer>" for text in texts))

    def score(self, task: Task, trajectory: Trajectory) -> Score:
        golds = [read_gold(task, untagged(gold, "answer"), words=True) for gold in gold_texts(task)]
        if trajectory.outcome is Outcome.TRUNCATED and not self.options.truncated:
            return Score(0.0, {"accuracy": 0.0, "format": 0.0})
        response = trajectory.response
        answer = (
            last_tagged(response, "answer") if response.count("<answer>") == response.count("</answer>") == 1 else ""
        )
        answer = unboxed(answer)
        accuracy = float(any(states(answer, gold, self.options.precision) for gold in golds))
        well_formed = float(is_well_formed(response))
        weight = self.options.format_weight
        return Score((1 - weight) * accuracy + weight * well_formed, {"accuracy": accuracy, "format": well_formed})


def is_well_formed(response: str) -> bool:
    """Return True if the response is only `<think>...</think><answer>...</answer>`, with both tags not empty."""
    before, _, rest = response.partition("<think>")
    thought, _, rest = rest.partition("</think>")
    between, _, rest = rest.partition("<answer>")
    answer, _, after = rest.partition("</answer>")
    alone = not (before + between + after).strip()
    return alone and bool(thought.strip() and answer.strip()) and all(response.count(tag) == 1 for tag in TAGS)
