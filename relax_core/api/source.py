# SPDX-License-Identifier: Apache-2.0
"""The contracts of task sources, of samplers, which choose tasks, and of filters, which drop finished groups."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic

from relax_core.api.batch import AttemptId
from relax_core.api.component import Configurable, OptionsT
from relax_core.api.task import Task
from relax_core.api.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class BadRow:
    """An unusable row of a task file."""

    where: str
    """`file:line` or the row's key."""
    reason: str
    field: str = ""
    """The faulty part of the row; empty: unknown."""
    fix: str = ""
    """The fix; empty if the reason names it."""


class TaskSource(Configurable[OptionsT], Generic[OptionsT]):
    """A reader of tasks with random access, so that a resumed run continues with the same task."""

    kind: ClassVar[str] = "task-source"
    suffixes: ClassVar[tuple[str, ...]] = ()
    """Suffixes of the files that the source reads."""

    @abstractmethod
    def open(self, path: str, columns: Mapping[str, str]) -> None:
        """Open a file or folder; raise ConfigError with file and line if it can't be read.

        `columns`: the task's columns by their names in the file: {"prompt": "question"}.
        """

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, index: int) -> Task: ...

    def where(self, index: int) -> str:
        """Return the place of a task for people: `file:line`, or the task's id."""
        return f"task {self[index].id}"

    def problems(self) -> Iterator[BadRow]:
        """Yield every unusable row, for `relax data check`."""
        return iter(())


class Sampler(Configurable[OptionsT], Generic[OptionsT]):
    """A chooser of the task of each group, by seed and group number alone or by earlier rewards (curricula)."""

    kind: ClassVar[str] = "sampler"

    def open(self, tasks: Sequence[Task]) -> None:
        """Take the tasks to choose from, before the first `pick`; indexing `tasks` reads the row from the file.

        Raise ConfigError if a task lacks a column that the sampler needs.
        """

    @abstractmethod
    def pick(self, group: int, num_tasks: int, seed: int) -> int:
        """Return the index of the task for a group; called once for each group."""

    def learned(self, group: int, task: int, rewards: Sequence[float]) -> None:
        """Take the rewards of a finished group, whose task has index `task`."""

    def state(self) -> Mapping[str, Any]:
        """Return the sampler's state as JSON data, which every checkpoint contains; empty for a stateless sampler."""
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore the result of an earlier `state`."""


class Filter(Configurable[OptionsT], Generic[OptionsT]):
    """A rule that drops finished groups, such as groups without variance; new groups take their places."""

    kind: ClassVar[str] = "filter"

    @abstractmethod
    def reject(
        self, task: Task, attempts: Sequence[AttemptId], trajectories: Sequence[Trajectory], rewards: Sequence[float]
    ) -> str:
        """Return the reason to drop the group, or "" to keep it.

        The reward of a sample that was not judged is NaN.
        """
