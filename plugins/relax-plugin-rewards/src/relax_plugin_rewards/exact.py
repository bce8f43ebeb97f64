# SPDX-License-Identifier: Apache-2.0
"""The reward `exact`: 1 if the whole response, without special tokens, is the answer's text. Only `strip` normalises."""

from __future__ import annotations

from relax_core.api import Options, Outcome, Reward, Task, Trajectory


class ExactOptions(Options):
    """Options of `exact`."""

    strip: bool = False
    """Ignore white space at the start and end of response and answer."""
    truncated: bool = False
    """Judge truncated responses too; by default a truncated response scores 0."""


class Exact(Reward[ExactOptions]):
    """A reward of 1 if the whole response equals the answer, else 0."""

    needs_columns = ("answer",)

    def score(self, task: Task, trajectory: Trajectory) -> float:
        if task.answer is None:
            raise ValueError(f"task {task.id} has no answer; give every row of the task file an `answer` column")
        if trajectory.outcome is Outcome.TRUNCATED and not self.options.truncated:
            return 0.0
        response, answer = trajectory.response, str(task.answer)
        if self.options.strip:
            response, answer = response.strip(), answer.strip()
        return float(response == answer)
