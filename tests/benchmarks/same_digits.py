# SPDX-License-Identifier: Apache-2.0
"""The second reward of algorithms that learn from several: the right characters, in whatever order."""

from relax_core.api import Reward, Task, Trajectory


class SameDigits(Reward):
    """1 for the answer's characters."""

    needs_columns = ("answer",)

    def score(self, task: Task, trajectory: Trajectory) -> float:
        return float(sorted(trajectory.response) == sorted(str(task.answer)))
