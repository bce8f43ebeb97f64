# SPDX-License-Identifier: Apache-2.0
"""A single-file plugin for the benchmark `defaults`: every token is trained with exactly the lag that the run allows.

The trainer begins the step at version v only after the groups of all steps up to v + `lag` have been sampled. The gate
admits no more groups before that step is committed, so the next version finds the engine idle and samples the next
step's groups alone. Trainer and filter are of one process, so this needs the inline runner.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from pydantic import Field
from relax_plugin_torch.options import TorchOptions
from relax_plugin_torch.rank import Rank

from relax_core.api import AttemptId, Filter, Options, Task, Trajectory, Version

LIMIT_S = 1200.0
"""Seconds that a step waits for its groups; an inline run has one thread, so a busy machine takes minutes."""
POLL_S = 0.002
_sampled: set[int] = set()
"""Numbers of the groups that were sampled and judged."""


class LockstepOptions(TorchOptions):
    groups_per_step: int = Field(gt=0)
    """`rollout.groups_per_step` of the run."""
    steps: int = Field(gt=0)
    """`steps` of the run."""
    lag: int = Field(ge=0)
    """`max_staleness` of the run."""


class Lockstep(Rank):
    """The torch trainer, which waits at the start of each step."""

    options: LockstepOptions

    @classmethod
    def options_model(cls) -> type[LockstepOptions]:
        return LockstepOptions

    async def begin_step(self, version: Version) -> None:  # a host awaits async methods
        options = self.options
        wanted = min(options.steps, version.step + 1 + options.lag) * options.groups_per_step
        async with asyncio.timeout(LIMIT_S):
            while len(_sampled) < wanted:
                await asyncio.sleep(POLL_S)
        super().begin_step(version)


class Sampled(Filter[Options]):
    """Keeps every group, and notes its number."""

    def reject(
        self, task: Task, attempts: Sequence[AttemptId], trajectories: Sequence[Trajectory], rewards: Sequence[float]
    ) -> str:
        _sampled.add(attempts[0].group)
        return ""
