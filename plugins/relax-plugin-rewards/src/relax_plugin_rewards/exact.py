# SPDX-License-Identifier: Apache-2.0
"""The reward `exact`: 1 if the whole response, without special tokens, is the answer.

A gold answer that is text is compared as text; only `strip` normalises. A gold answer that is a number in the task file
is compared as a number: 42.0, as a column of floats has it, is right for the response `42`.
"""

from __future__ import annotations

import re
from decimal import Decimal

from relax_core.api import Gold, Options, Outcome, Reward, Task, Trajectory
from relax_plugin_rewards.answers import single_gold

_NUMBER = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{1,4})?", re.ASCII)


class ExactOptions(Options):
    """Options of `exact`."""

    strip: bool = False
    """Ignore white space at the start and end of response and answer."""
    truncated: bool = False
    """Judge truncated responses too; by default a truncated response scores 0."""


class Exact(Reward[ExactOptions]):
    """A reward of 1 if the whole response equals the answer, else 0."""

    needs_columns = ("answer",)

    def gold(self, task: Task) -> Gold:
        text = self._gold(task)
        return Gold(f"{'text' if isinstance(task.answer, str) else 'number'} {text!r}", (text,))

    def score(self, task: Task, trajectory: Trajectory) -> float:
        gold = self._gold(task)
        if trajectory.outcome is Outcome.TRUNCATED and not self.options.truncated:
            return 0.0
        response = trajectory.response.strip() if self.options.strip else trajectory.response
        if not isinstance(task.answer, str) and _NUMBER.fullmatch(response):
            return float(Decimal(response) == Decimal(gold))
        return float(response == gold)

    def _gold(self, task: Task) -> str:
        """Return the gold answer as text. Raises ValueError naming the task for a list, a table, NaN or no answer."""
        text = single_gold(task)
        return task.answer if isinstance(task.answer, str) and not self.options.strip else text
