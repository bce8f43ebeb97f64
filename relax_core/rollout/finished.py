# SPDX-License-Identifier: Apache-2.0
"""Groups on their way from the engines to the bus: finished, then judged. Data only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from relax_core.api.batch import AttemptId
from relax_core.api.bus import Issue
from relax_core.api.task import Task
from relax_core.api.trajectory import Trajectory
from relax_core.api.version import Version
from relax_core.rollout.judge import Judgement


@dataclass(frozen=True, slots=True)
class FinishedGroup:
    """A group whose samples have ended, however they did."""

    issue: Issue
    task: Task
    trajectories: tuple[Trajectory, ...]
    version: Version
    """Of the engines when it was admitted."""
    seconds: float
    unfit: str = ""
    """Why it was not generated, where its task can't be trained on: it is replaced like one that a filter rejects."""


@dataclass(frozen=True, slots=True)
class JudgedGroup:
    """And what each sample is worth."""

    group: FinishedGroup
    judgements: tuple[Judgement, ...]
    rejected_by: str = ""
    """The filter that drops the group."""
    reason: str = ""

    @property
    def samples(self) -> Iterator[tuple[AttemptId, Trajectory, Judgement]]:
        return zip(self.group.issue.attempts, self.group.trajectories, self.judgements, strict=True)
