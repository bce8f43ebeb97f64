# SPDX-License-Identifier: Apache-2.0
"""The contract of rewards, which judge one trajectory, a batch or a group, in a `def` or `async def` method.

The core runs rewards in killable processes. For a wrong answer, a reward returns a low score such as 0. An exception or
a timeout becomes the sample's outcome, never a score.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Generic, TypeAlias

from relax_core.api.component import Configurable, OptionsT
from relax_core.api.engine import NO_ENGINES, ModelClient
from relax_core.api.sandbox import NO_SANDBOX, SandboxClient, SandboxLimits
from relax_core.api.task import Task
from relax_core.api.trajectory import Trajectory

LARGEST_REWARD = 1e9
"""Largest absolute value of a reward, its parts and the credit of a turn: float32 holds sums of its squares."""


@dataclass(frozen=True, slots=True)
class Score:
    """The result of a reward for one trajectory; returning the float alone means the same as `Score(value)`."""

    value: float
    parts: Mapping[str, float] = field(default_factory=dict)
    """Named components, logged as `reward/<reward>/<part>`. Names with a slash, such as `verdicts/agreement`, are
    figures about the judgement itself; algorithms that weight components ignore them."""
    steps: tuple[float, ...] = ()
    """[turns] credit of single turns; may be shorter than the number of turns."""


@dataclass(frozen=True, slots=True)
class Gold:
    """A task's gold answer as a reward reads it, and the responses that state this answer."""

    read: str
    """The value that the reward compares responses with, to show to a person."""
    responses: tuple[str, ...]
    """Responses that must score `best`: each gold answer of the task as a policy should write it, boxed and plain. Empty
    if the answer can't be stated as a response, such as the cases of a program; the check only reads it."""
    best: float = 1.0
    """Score of a right response."""


class Unreadable(ValueError):
    """The error that a reward raises when the verdict of another model or program can't be parsed.

    The sample gets the outcome `reward_unreadable` and is never trained. `parts` are logged like those of a `Score`. A
    reward of batches or groups that raises this loses all its samples; in the place of a score it loses that sample.
    """

    def __init__(self, message: str, parts: Mapping[str, float] | None = None) -> None:
        super().__init__(message)
        self.parts = dict(parts or {})


Scored: TypeAlias = "float | Score"


class _AnyReward(Configurable[OptionsT], Generic[OptionsT]):
    kind: ClassVar[str] = "reward"
    needs_columns: ClassVar[tuple[str, ...]] = ()
    """Columns of the task file that the reward reads; checked against the data before the run starts."""
    needs_engines: tuple[str, ...] = ()
    """Names of auxiliary pools (`[[engines]]`) that an `async def` method calls; `__init__` may set the names."""
    engines: Mapping[str, ModelClient] = NO_ENGINES
    """pool -> client, set before the first sample. Waiting for an answer does not count against `timeout_s`."""
    needs_sandbox: SandboxLimits | None = None
    """Default limits of boxes that an `async def` method opens; `__init__` may set the limits. None: no sandbox."""
    sandbox: SandboxClient = NO_SANDBOX
    """A client of the run's sandbox, set before the first sample. Its programs' time does not count for `timeout_s`."""

    def gold(self, task: Task) -> Gold | None:
        """Read a task's gold answer as a whole; None: the task has no gold answer of this reward.

        A run scores the responses at its start, and refuses too many tasks whose own gold answer scores less than
        `best`; `relax data check` lists these tasks. Raise ValueError with the reason if the answer can't be read as a
        whole. Not called for a reward that calls an engine pool. The responses of one with a sandbox are not scored.
        """
        return None

    def close(self) -> Awaitable[None] | None:
        """Release the resources of `__init__`, once per process, within 5 s; `async def` if the scoring method is.

        A killed process never calls `close`, so nothing may depend on this call.
        """
        return None


class Reward(_AnyReward[OptionsT], Generic[OptionsT]):
    """A reward that judges one trajectory at a time."""

    @abstractmethod
    def score(self, task: Task, trajectory: Trajectory) -> Scored | Awaitable[Scored]: ...


class BatchReward(_AnyReward[OptionsT], Generic[OptionsT]):
    """A reward that judges many trajectories at once, such as by a model; one result for each, in order."""

    @abstractmethod
    def score_batch(
        self, tasks: Sequence[Task], trajectories: Sequence[Trajectory]
    ) -> Sequence[Scored | Unreadable] | Awaitable[Sequence[Scored | Unreadable]]: ...


class GroupReward(_AnyReward[OptionsT], Generic[OptionsT]):
    """A reward that judges the samples of one group together, such as by ranking; one result for each, in order."""

    @abstractmethod
    def score_group(
        self, task: Task, trajectories: Sequence[Trajectory]
    ) -> Sequence[Scored | Unreadable] | Awaitable[Sequence[Scored | Unreadable]]: ...
