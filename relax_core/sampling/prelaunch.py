# SPDX-License-Identifier: Apache-2.0
"""Prelaunch of groups: environments start before their groups are issued; sampling starts once a group is granted.

A container or server that takes half a minute to start is then ready when engines have room. The rollout worker chooses
the tasks and plays the samples.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from relax_core.api.bus import Issue
from relax_core.api.trajectory import Trajectory
from relax_core.engines.requests import Completion, GenerateAll, GenerateCall
from relax_core.sampling.groups import InflightGroup

Generator = Callable[[Sequence[int]], GenerateAll]
"""A function that takes indices of samples in their group and returns the `generate` function of these samples."""


class PrelaunchedGroup:
    """One group whose samples start before the group is issued: `launched -> granted | cancelled`.

    Invariants:
    - Before the grant, every turn of its samples waits, so no request reaches an engine. Environment deadlines stand
      still during this wait, as in any turn.
    - After the grant, the samples' turns use the attempts and the floor of the issued group.
    """

    def __init__(
        self, size: int, play: Callable[[Generator, Callable[[], None]], Awaitable[Sequence[Trajectory]]]
    ) -> None:
        """Start `size` samples with `play`, a partial call of `RolloutWorker.samples`."""
        self.size = size
        self._granted = asyncio.Event()
        self._group: InflightGroup | None = None
        self._generator: Generator | None = None
        self._num_ended = 0
        """Number of samples that ended before the grant because their environments failed."""
        self._playing = asyncio.ensure_future(play(self._turns, self._ended))

    def fits(self, issue: Issue) -> bool:
        """Return True if `issue` is of the started samples; a repeated issue (`retry` > 0) has different seeds."""
        return issue.retry == 0 and [attempt.sample for attempt in issue.attempts] == list(range(self.size))

    async def go_on(self, group: InflightGroup, generator: Generator) -> Sequence[Trajectory]:
        """Grant the group its turns; return its samples once all have ended. Cancelling this cancels the samples."""
        self._group, self._generator = group, generator
        group.num_ended = self._num_ended
        self._granted.set()
        return await self._playing

    async def cancel(self) -> None:
        """Cancel the samples and wait until their environments are closed."""
        self._playing.cancel()
        await asyncio.gather(self._playing, return_exceptions=True)

    def _turns(self, places: Sequence[int]) -> GenerateAll:
        generate: GenerateAll | None = None

        async def granted(calls: Sequence[GenerateCall]) -> Sequence[Completion]:
            nonlocal generate
            await self._granted.wait()
            if generate is None:
                assert self._generator is not None
                generate = self._generator(places)
            return await generate(calls)

        return granted

    def _ended(self) -> None:
        if self._group is None:
            self._num_ended += 1
        else:
            self._group.sample_ended()
