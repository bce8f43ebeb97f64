# SPDX-License-Identifier: Apache-2.0
"""Contracts of task sources, of their order, and of the choice of finished groups that are kept."""

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
    """One row of a task file that can't be used, and why."""

    where: str
    """`file:line` or the row's key."""
    reason: str
    field: str = ""
    """Which part of it, where that is known."""
    fix: str = ""
    """What to do about it, where the reason does not say."""


class TaskSource(Configurable[OptionsT], Generic[OptionsT]):
    """Reads tasks; random access, so that a resumed run continues at the same one."""

    kind: ClassVar[str] = "task-source"
    suffixes: ClassVar[tuple[str, ...]] = ()
    """File suffixes it reads."""

    @abstractmethod
    def open(self, path: str, columns: Mapping[str, str]) -> None:
        """`columns` renames: {"prompt": "question"}. Raises ConfigError naming file and line."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, index: int) -> Task: ...

    def where(self, index: int) -> str:
        """Name the place where a person finds this task: `file:line`, or its id."""
        return f"task {self[index].id}"

    def problems(self) -> Iterator[BadRow]:
        """Every unusable row, for `relax data check`."""
        return iter(())


class Sampler(Configurable[OptionsT], Generic[OptionsT]):
    """Chooses the task of a group: a function of the seed and the group's issue number, or stateful (curricula)."""

    kind: ClassVar[str] = "sampler"

    def open(self, tasks: Sequence[Task]) -> None:
        """The tasks it picks from, before the first pick. Each look at one reads its row; ConfigError where one lacks a
        column that it needs."""

    @abstractmethod
    def pick(self, group: int, num_tasks: int, seed: int) -> int:
        """Index of the task for this group; asked once a group."""

    def learned(self, group: int, task: int, rewards: Sequence[float]) -> None:
        """A group finished with these rewards."""

    def state(self) -> Mapping[str, Any]:
        """Return what the sampler has learned, as JSON; empty where it learns nothing. Every checkpoint contains it."""
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`."""


class Filter(Configurable[OptionsT], Generic[OptionsT]):
    """Drops finished groups by a counted reason (zero variance, too long); refill issues others instead."""

    kind: ClassVar[str] = "filter"

    @abstractmethod
    def reject(
        self, task: Task, attempts: Sequence[AttemptId], trajectories: Sequence[Trajectory], rewards: Sequence[float]
    ) -> str:
        """The reason to drop the group, or an empty string. A sample without a verdict has the reward NaN."""
