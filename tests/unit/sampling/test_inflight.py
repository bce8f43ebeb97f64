# SPDX-License-Identifier: Apache-2.0
"""A group's floor is over all its samples, and the length of what is under way is known at every moment."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import cast

from relax_core.api.batch import AttemptId
from relax_core.api.bus import Issue
from relax_core.api.task import Task
from relax_core.api.weights import Version
from relax_core.engines.pool import EnginePool
from relax_core.engines.requests import PendingRequest, watch_for
from relax_core.sampling.groups import InflightGroup
from tests.unit.sampling.toy_policy import Completion, answered

FIRST, SECOND = AttemptId(0, 0, 0), AttemptId(0, 1, 0)


def begun(step: int, engines: Engines) -> InflightGroup:
    """A group of two samples, admitted when the engines had the weights of `step`."""
    pool = cast(EnginePool, engines)
    return InflightGroup(Issue(0, (FIRST, SECOND)), Task("1", "a"), Version("actor", 0, step), pool)


def turn(place: int) -> list[PendingRequest]:
    return [PendingRequest((1,), 9, place=place)]


class Engines:
    """Gives what the test says, one call after another, and remembers what it was asked."""

    def __init__(self, *given: Completion) -> None:
        self.given, self.calls = list(given), list[PendingRequest]()

    async def generate(self, requests: Sequence[PendingRequest]) -> None:
        self.calls += requests
        for request in requests:
            answered(request, self.given.pop(0))


def sampled(*versions: int, oldest_cache: tuple[int, ...] = ()) -> Completion:
    return Completion((5,) * len(versions), (-1.0,) * len(versions), versions, oldest_cache)


async def test_the_floor_of_every_turn_is_the_oldest_version_of_the_whole_group() -> None:
    engines = Engines(sampled(6, 7), sampled(5, 6), sampled(7), sampled(7))
    group = begun(4, engines)
    for place in (0, 1, 0, 1):
        await group.generate(turn(place))
    assert [call.session for call in engines.calls] == [FIRST, SECOND, FIRST, SECOND]
    assert [call.floor for call in engines.calls] == [4, 6, 5, 5]


async def test_the_floor_is_as_old_as_the_caches() -> None:
    engines = Engines(sampled(5, 6, oldest_cache=(4, 4)), sampled(6))
    group = begun(2, engines)
    for _ in range(2):
        await group.generate(turn(0))
    assert [call.floor for call in engines.calls] == [2, 4]


async def test_lengths_count_turns_that_ended_and_tokens_that_came_so_far() -> None:
    began = asyncio.Event()

    class Hanging(Engines):
        async def generate(self, requests: Sequence[PendingRequest]) -> None:
            if self.given:
                await super().generate(requests)
            else:
                requests[0].tokens += [7, 8, 9]
                began.set()
                await asyncio.Future()

    group = begun(0, Hanging(sampled(1, 1)))
    await group.generate(turn(0))
    playing = asyncio.create_task(group.generate(turn(1)))
    await began.wait()
    assert group.lengths == {FIRST: 2, SECOND: 3}
    playing.cancel()
    await asyncio.gather(playing, return_exceptions=True)
    assert group.lengths == {FIRST: 2, SECOND: 3}, "what was given up keeps its length"
    group.sample_started(1)
    assert group.lengths == {FIRST: 2, SECOND: 0}, "a sample that is played again counts from its start"
    assert group.num_starting == 1


def test_a_stop_text_is_seen_as_soon_as_it_is_whole_wherever_it_was_cut() -> None:
    def decode(tokens: tuple[int, ...]) -> str:
        return bytes(tokens).decode(errors="replace")

    text = "a long answer. déjà vu END and more".encode()
    whole = text.index(b"END") + 3
    for size in (1, 2, 7, 100):
        watch = watch_for(("END", "déjà vu END"), decode)
        assert watch is not None
        seen = next(n for n in [*range(size, len(text), size), len(text)] if watch(text[:n]))
        assert whole <= seen < whole + size
    assert watch_for((), decode) is None
