# SPDX-License-Identifier: Apache-2.0
"""Filters of finished groups. The run generates a new group for each dropped group, so that steps stay complete."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pydantic import Field, NonNegativeFloat

from relax_core.api import AttemptId, Filter, Options, Outcome, Task, Trajectory


class ZeroVarianceOptions(Options):
    tolerance: NonNegativeFloat = 0.0
    """Maximum difference between the rewards of a group that still count as equal."""


class ZeroVariance(Filter[ZeroVarianceOptions]):
    """Drops groups with equal rewards: their advantages are 0 (DAPO's dynamic sampling, arXiv 2503.14476, 3.2)."""

    def reject(
        self, task: Task, attempts: Sequence[AttemptId], trajectories: Sequence[Trajectory], rewards: Sequence[float]
    ) -> str:
        valid = _valid(rewards)
        if not valid or max(valid) - min(valid) > self.options.tolerance:
            return ""
        return f"all rewards are {valid[0]:g}"


class RewardBandOptions(Options):
    low: float = 0.1
    """Minimum mean reward of a group; groups with a lower mean are dropped as too hard."""
    high: float = 0.9
    """Maximum mean reward of a group; groups with a higher mean are dropped as too easy."""


class RewardBand(Filter[RewardBandOptions]):
    """Drops groups that are too hard or too easy (online difficulty filtering, arXiv 2502.01456)."""

    def reject(
        self, task: Task, attempts: Sequence[AttemptId], trajectories: Sequence[Trajectory], rewards: Sequence[float]
    ) -> str:
        valid = _valid(rewards)
        if not valid:
            return ""
        mean = sum(valid) / len(valid)
        if mean < self.options.low:
            return "too hard"
        return "too easy" if mean > self.options.high else ""


class TruncatedOptions(Options):
    most: float = Field(0.5, ge=0.0, lt=1.0)
    """Maximum share of truncated samples in a group; groups with a larger share are dropped."""


class Truncated(Filter[TruncatedOptions]):
    """Drops groups with many truncated samples: their rewards depend more on the length limit than on the task."""

    def reject(
        self, task: Task, attempts: Sequence[AttemptId], trajectories: Sequence[Trajectory], rewards: Sequence[float]
    ) -> str:
        cut = sum(trajectory.outcome is Outcome.TRUNCATED for trajectory in trajectories)
        return "cut off" if cut > self.options.most * len(trajectories) else ""


def _valid(rewards: Sequence[float]) -> list[float]:
    """Return the rewards of judged samples; the reward of a sample that was not judged is NaN."""
    return [reward for reward in rewards if not math.isnan(reward)]
