"""The filter `{{ cookiecutter.name }}`: decides which finished groups are not trained. New groups replace them."""

from collections.abc import Sequence
from math import isnan

from relax_core.api import AttemptId, Filter, Options, Task, Trajectory


class {{ cookiecutter.class_name }}Options(Options):
    """Options of `{{ cookiecutter.name }}`."""

    most: float = 0.9
    """Largest mean reward of a group that is kept."""


class {{ cookiecutter.class_name }}(Filter[{{ cookiecutter.class_name }}Options]):
    """Drops a group whose mean reward is above `most`."""

    def reject(
        self, task: Task, attempts: Sequence[AttemptId], trajectories: Sequence[Trajectory], rewards: Sequence[float]
    ) -> str:
        """Return the reason to drop the group, or "" to keep the group. A sample that was not judged has reward NaN.

        The transcripts of the group's samples name the reason.
        """
        judged = [reward for reward in rewards if not isnan(reward)]
        return "too easy" if judged and sum(judged) / len(judged) > self.options.most else ""
