"""The sampler `{{ cookiecutter.name }}`: chooses the task of each group."""

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from relax_core.api import Options, Sampler


class {{ cookiecutter.class_name }}Options(Options):
    """Options of `{{ cookiecutter.name }}`."""

    share: float = 0.5
    """Share of the groups that repeat an unsolved task, as long as there are unsolved tasks."""
    solved: float = 1.0
    """Reward from which a sample counts as solved."""


class {{ cookiecutter.class_name }}(Sampler[{{ cookiecutter.class_name }}Options]):
    """Draws from all tasks, or from the tasks whose newest group has no solved sample."""

    def __init__(self, options: {{ cookiecutter.class_name }}Options | None = None) -> None:
        super().__init__(options)
        self._unsolved: set[int] = set()

    def pick(self, group: int, num_tasks: int, seed: int) -> int:
        """Return the index of a task. Seed and group number give the random numbers, so that a run can be repeated."""
        random = Random(f"{{ cookiecutter.name }} {seed} {group}")
        if self._unsolved and random.random() < self.options.share:
            return random.choice(sorted(self._unsolved))
        return random.randrange(num_tasks)

    def learned(self, group: int, task: int, rewards: Sequence[float]) -> None:
        """Receive the rewards of a finished group. Without rewards, no sample of the group was judged."""
        if rewards and max(rewards) < self.options.solved:
            self._unsolved.add(task)
        elif rewards:
            self._unsolved.discard(task)

    def state(self) -> Mapping[str, Any]:
        """Return what a resumed run needs, as JSON data."""
        return {"unsolved": sorted(self._unsolved)}

    def load(self, state: Mapping[str, Any]) -> None:
        self._unsolved = set(state.get("unsolved", ()))
