# SPDX-License-Identifier: Apache-2.0
"""A group's floor is over all its samples, and the length of what is under way is known at every moment."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from relax_core.api.batch import AttemptId
from relax_core.api.bus import Issue
from relax_core.api.task import Task
from relax_core.api.weights import Version
from relax_core.engines.requests import Completion, GenerateCall, watch_for
from relax_core.sampling.groups import InflightGroup

FIRST, SECOND = AttemptId(0, 0, 0), AttemptId(0, 1, 0)
CALL = GenerateCall((1,), 9, seed=0)


def begun(step: int) -> InflightGroup:
    """A group of two samples, admitted when the engines had the weights of `step`."""
    return InflightGroup(Issue(0, (FIRST, SECOND)), Task("1", "a"), Version("actor", 0, step))


class Engines:
    """Gives what the test says, one call after another, and remembers what it was asked."""

    def __init__(self, *given: Completion) -> None:
        self.given, self.calls = list(given), list[GenerateCall]()

    async def __call__(self, calls: Sequence[GenerateCall]) -> list[Completion]:
        self.calls += calls
        return [self.given.pop(0) for _ in calls]


def sampled(*versions: int, oldest_cache: tuple[int, ...] = ()) -> Completion:
    return Completion((5,) * len(versions), (-1.0,) * len(versions), versions, oldest_cache)


async def test_the_floor_of_every_turn_is_the_oldest_version_of_the_whole_group() -> None:
    group, engines = begun(4), Engines(sampled(6, 7), sampled(5, 6), sampled(7), sampled(7))
    first, second = group.generator([FIRST], engines), group.generator([SECOND], engines)
    for generate in (first, second, first, second):
        await generate([CALL])
    assert [call.floor for call in engines.calls] == [4, 6, 5, 5]


async def test_the_floor_is_as_old_as_the_caches() -> None:
    group = begun(2)
    engines = Engines(sampled(5, 6, oldest_cache=(4, 4)), sampled(6))
    for _ in range(2):
        await group.generator([FIRST], engines)([CALL])
    assert [call.floor for call in engines.calls] == [2, 4]


async def test_lengths_count_turns_that_ended_and_tokens_that_came_so_far() -> None:
    group = begun(0)
    await group.generator([FIRST], Engines(sampled(1, 1)))([CALL])
    began = asyncio.Event()

    async def hangs(calls: Sequence[GenerateCall]) -> list[Completion]:
        (call,) = calls
        assert call.watch is not None
        assert not call.watch([7, 8, 9])
        began.set()
        return await asyncio.Future()

    turn = asyncio.create_task(group.generator([SECOND], hangs)([CALL]))
    await began.wait()
    assert group.lengths == {FIRST: 2, SECOND: 3}
    turn.cancel()
    await asyncio.gather(turn, return_exceptions=True)
    assert group.lengths == {FIRST: 2, SECOND: 3}, "what was given up keeps its length"


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
