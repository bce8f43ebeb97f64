# SPDX-License-Identifier: Apache-2.0
"""Prelaunch of groups: environments start before their groups are issued; sampling starts once a group is granted.

A container or server that takes half a minute to start is then ready when engines have room. The rollout worker chooses
the tasks and plays the samples.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

from relax_core.api.bus import Issue
from relax_core.api.trajectory import Trajectory
from relax_core.engines.requests import PendingRequest
from relax_core.sampling.groups import InflightGroup


class PrelaunchedGroup:
    """The `Turns` of one group whose samples start before the group is issued: `launched -> granted | cancelled`.

    Invariants:
    - Before the grant, every turn of its samples waits, so no request reaches an engine. Environment deadlines stand
      still during this wait, as in any turn.
    - After the grant, the samples' turns use the attempts and the floor of the issued group.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._granted: asyncio.Future[InflightGroup] = asyncio.get_running_loop().create_future()
        self._num_ended = 0
        """Number of samples that ended before the grant because their environments failed."""

    def launch(self, samples: Coroutine[Any, Any, Sequence[Trajectory]]) -> None:
        """Start to play the samples: a call of `RolloutWorker.samples` with this object as its turns."""
        self._playing = asyncio.create_task(samples)

    def fits(self, issue: Issue) -> bool:
        """Return True if `issue` is of the started samples; a repeated issue (`retry` > 0) has different seeds."""
        return issue.retry == 0 and [attempt.sample for attempt in issue.attempts] == list(range(self.size))

    async def go_on(self, group: InflightGroup) -> Sequence[Trajectory]:
        """Grant the group its turns; return its samples once all have ended. Cancelling this cancels the samples."""
        group.num_ended = self._num_ended
        self._granted.set_result(group)
        return await self._playing

    async def cancel(self) -> None:
        """Cancel the samples and wait until their environments are closed."""
        self._playing.cancel()
        await asyncio.gather(self._playing, return_exceptions=True)

    def sample_started(self, place: int) -> None:
        if self._granted.done():
            self._granted.result().sample_started(place)

    async def generate(self, requests: Sequence[PendingRequest]) -> None:
        group = await asyncio.shield(self._granted)  # cancelling one turn must not cancel the grant
        await group.generate(requests)

    def sample_ended(self) -> None:
        if self._granted.done():
            self._granted.result().sample_ended()
        else:
            self._num_ended += 1
