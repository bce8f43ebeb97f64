# SPDX-License-Identifier: Apache-2.0
"""Exact match: the whole response, special tokens removed, is the answer. No search, no normalisation beyond `strip`."""

from __future__ import annotations

from relax_core.api import Options, Outcome, Reward, Task, Trajectory


class ExactOptions(Options):
    """Options of `exact`."""

    strip: bool = False
    """Ignore white space around response and answer."""
    truncated: bool = False
    """Judge a response that a limit cut off; otherwise it scores 0: finishing is part of the task."""


class Exact(Reward[ExactOptions]):
    """Gives 1 when the whole response equals the answer, else 0."""

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
