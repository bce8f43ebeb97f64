# SPDX-License-Identifier: Apache-2.0
"""Rewards: judge one trajectory, a batch, or a group. A float is `Score(value)`; `def` or `async def`.

The core runs synchronous rewards in killable processes. A wrong answer is the author's 0;
an exception or a timeout becomes the sample's outcome, never a zero.
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


@dataclass(frozen=True, slots=True)
class Score:
    """A judgement; `parts` are logged as `reward/<reward>/<part>`, `steps` credit single turns.

    A part with a slash in its name, such as `verdicts/agreement`, is a figure about the judgement, and no reward to algorithms
    that weigh parts.
    """

    value: float
    parts: Mapping[str, float] = field(default_factory=dict)
    steps: tuple[float, ...] = ()


class Unreadable(ValueError):
    """Raise where a verdict that another model or a program wrote can't be read: the sample ends as `reward_unreadable`, which
    is no zero and never trained. `parts` are logged as those of a `Score` are."""

    def __init__(self, message: str, parts: Mapping[str, float] | None = None) -> None:
        super().__init__(message)
        self.parts = dict(parts or {})


Scored: TypeAlias = "float | Score"


class _AnyReward(Configurable[OptionsT], Generic[OptionsT]):
    kind: ClassVar[str] = "reward"
    needs_columns: ClassVar[tuple[str, ...]] = ()
    """Columns of the task file it reads; checked against the data before start."""
    needs_engines: tuple[str, ...] = ()
    """Pools of `[[engines]]` that it asks, which it does with `async def`; set by `__init__` where an option names them."""
    engines: Mapping[str, ModelClient] = NO_ENGINES
    """A client for each of them, set before any sample is judged. Waiting for one does not count against `timeout_s`."""
    needs_sandbox: SandboxLimits | None = None
    """Bounds of the boxes in which it runs programs, which it does with `async def`; set by `__init__` where options say so."""
    sandbox: SandboxClient = NO_SANDBOX
    """A client of the run's sandbox, set before any sample is judged. Running programs do not count against `timeout_s`."""

    def close(self) -> Awaitable[None] | None:
        """Release what `__init__` took, once a process, within 5 s; `async def` where judging is. A process that is killed has
        no time for it: nothing may depend on it."""
        return None


class Reward(_AnyReward[OptionsT], Generic[OptionsT]):
    """Judges one trajectory."""

    @abstractmethod
    def score(self, task: Task, trajectory: Trajectory) -> Scored | Awaitable[Scored]: ...


class BatchReward(_AnyReward[OptionsT], Generic[OptionsT]):
    """Judges many at once, in order, where batching pays (a model, a remote service)."""

    @abstractmethod
    def score_batch(
        self, tasks: Sequence[Task], trajectories: Sequence[Trajectory]
    ) -> Sequence[Scored] | Awaitable[Sequence[Scored]]: ...


class GroupReward(_AnyReward[OptionsT], Generic[OptionsT]):
    """Judges the samples of one group together (rankings, diversity)."""

    @abstractmethod
    def score_group(
        self, task: Task, trajectories: Sequence[Trajectory]
    ) -> Sequence[Scored] | Awaitable[Sequence[Scored]]: ...
