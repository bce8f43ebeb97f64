# SPDX-License-Identifier: Apache-2.0
"""Groups whose samples are begun before they are issued: environments start, and nothing is sampled until the grant.

A container or a server that takes half a minute to start is ready then when engines have room. Nothing here chooses tasks or
plays samples: that is the rollout worker's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from relax_core.api.bus import Issue
from relax_core.api.trajectory import Trajectory
from relax_core.engines.requests import Completion, GenerateAll, GenerateCall
from relax_core.sampling.groups import InflightGroup

Generator = Callable[[Sequence[int]], GenerateAll]
"""Function that gives a `generate` for the samples at these places of a group."""


class PrelaunchedGroup:
    """One group that is expected to be issued next: `launched -> granted | cancelled`.

    Invariants:
    - Before the grant every turn of its samples waits, so that no token is sampled and no engine knows of it. The own time of
      an environment stands still in such a wait as in any other turn.
    - After the grant its turns are those of the group that was issued, with its attempts and its floor.
    """

    def __init__(
        self, size: int, play: Callable[[Generator, Callable[[], None]], Awaitable[Sequence[Trajectory]]]
    ) -> None:
        """`play` begins the samples, as `RolloutWorker.samples` does."""
        self.size = size
        self._granted = asyncio.Event()
        self._group: InflightGroup | None = None
        self._generator: Generator | None = None
        self._num_ended = 0
        """Samples that ended before the grant: their environments failed."""
        self._playing = asyncio.ensure_future(play(self._turns, self._ended))

    def fits(self, issue: Issue) -> bool:
        """Tell whether an issue has the samples that were begun: one that is issued again has other seeds."""
        return issue.retry == 0 and [attempt.sample for attempt in issue.attempts] == list(range(self.size))

    async def go_on(self, group: InflightGroup, generator: Generator) -> Sequence[Trajectory]:
        """Grant the group its turns, and return its samples when they have ended. Cancelled, they are, too."""
        self._group, self._generator = group, generator
        group.num_ended = self._num_ended
        self._granted.set()
        return await self._playing

    async def cancel(self) -> None:
        """End the samples; their environments are closed."""
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
