# SPDX-License-Identifier: Apache-2.0
"""The contracts of task sources, which read tasks; samplers, which choose tasks; and filters, which drop groups."""

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
    """Location of the row: `file:line` or the row's key."""
    reason: str
    field: str = ""
    """The faulty part of the row; empty: unknown."""
    fix: str = ""
    """The fix; empty if `reason` names the fix."""


class TaskSource(Configurable[OptionsT], Generic[OptionsT]):
    """A reader of tasks by index. Access by index lets a resumed run continue with the same task."""

    kind: ClassVar[str] = "task-source"
    suffixes: ClassVar[tuple[str, ...]] = ()
    """Suffixes of the files that the source reads."""

    @abstractmethod
    def open(self, path: str, columns: Mapping[str, str]) -> None:
        """Open a file or folder; raise ConfigError with file and line if it can't be read.

        `columns`: column of the task -> column of the file, such as {"prompt": "question"}.
        """

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, index: int) -> Task: ...

    def where(self, index: int) -> str:
        """Return a task's location to display: `file:line`, or the task's id."""
        return f"task {self[index].id}"

    def problems(self) -> Iterator[BadRow]:
        """Yield every unusable row, for `relax data check`."""
        return iter(())

    def remarks(self) -> Iterator[str]:
        """Yield sentences about values that tasks lack or have in part, for the log and `relax data check`."""
        return iter(())


class Sampler(Configurable[OptionsT], Generic[OptionsT]):
    """A rule that chooses each group's task, by seed and group number or also by earlier rewards (curricula)."""

    kind: ClassVar[str] = "sampler"

    def open(self, tasks: Sequence[Task]) -> None:
        """Take the tasks to choose from, before the first `pick`; indexing `tasks` reads the row from the file.

        Raise ConfigError if a task lacks a column that the sampler needs.
        """

    @abstractmethod
    def pick(self, group: int, num_tasks: int, seed: int) -> int:
        """Return the index of the task for a group; called once for each group, in the order of group numbers.

        After a resume it is called again for the groups that were picked after the restored state was stored.
        """

    def learned(self, group: int, task: int, rewards: Sequence[float]) -> None:
        """Receive the rewards of a finished group; `task` is the index of its task."""

    def state(self) -> Mapping[str, object]:
        """Return the sampler's state as JSON data, which every checkpoint contains; empty for a stateless sampler."""
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `state` returned earlier."""


class Filter(Configurable[OptionsT], Generic[OptionsT]):
    """A rule that drops finished groups, such as groups with equal rewards; new groups replace them."""

    kind: ClassVar[str] = "filter"

    @abstractmethod
    def reject(
        self, task: Task, attempts: Sequence[AttemptId], trajectories: Sequence[Trajectory], rewards: Sequence[float]
    ) -> str:
        """Return the reason to drop the group, or "" to keep it.

        The reward of a sample that was not judged is NaN.
        """
