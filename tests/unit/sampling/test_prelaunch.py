# SPDX-License-Identifier: Apache-2.0
"""A group that is begun before its issue: no turn before the grant, no sample after a cancel."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest

from relax_core.api.batch import AttemptId
from relax_core.api.bus import Issue
from relax_core.api.task import Task
from relax_core.api.trajectory import Outcome, Trajectory
from relax_core.api.weights import Version
from relax_core.engines.requests import Completion, GenerateCall
from relax_core.sampling.groups import InflightGroup
from relax_core.sampling.prelaunch import Generator, PrelaunchedGroup

CALL = GenerateCall((1,), 9, seed=0)


class Played:
    """Two samples: the first fails as it starts, the second takes one turn."""

    def __init__(self) -> None:
        self.asked, self.closed = asyncio.Event(), False

    async def __call__(self, generator: Generator, ended: Callable[[], None]) -> Sequence[Trajectory]:
        ended()
        self.asked.set()
        try:
            await generator([1])([CALL])
            ended()
            return [Trajectory((), "", (), Outcome.ENVIRONMENT_ERROR), Trajectory((), "", ())]
        finally:
            self.closed = True


def attempts(retry: int = 0) -> Issue:
    return Issue(7, (AttemptId(7, 0, retry), AttemptId(7, 1, retry)), retry)


async def test_turns_wait_for_the_grant_and_are_then_those_of_the_issued_group() -> None:
    played = Played()
    launched = PrelaunchedGroup(2, played)
    given: list[tuple[Sequence[int], GenerateCall]] = []

    def generator(places: Sequence[int]) -> Callable[[Sequence[GenerateCall]], object]:
        async def generate(calls: Sequence[GenerateCall]) -> list[Completion]:
            given.extend((places, call) for call in calls)
            return [Completion((), (), ()) for _ in calls]

        return generate

    await played.asked.wait()
    await asyncio.sleep(0.01)
    assert not given
    group = InflightGroup(attempts(), Task("1", "a"), Version("actor", 0, 0))
    trajectories = await launched.go_on(group, generator)
    assert given == [([1], CALL)]
    assert len(trajectories) == group.num_ended == 2, "one had ended before"


async def test_what_is_cancelled_is_closed_before_or_after_the_grant() -> None:
    played = Played()
    launched = PrelaunchedGroup(2, played)
    await played.asked.wait()
    await launched.cancel()
    assert played.closed

    played = Played()
    launched = PrelaunchedGroup(2, played)
    group = InflightGroup(attempts(), Task("1", "a"), Version("actor", 0, 0))

    async def never(calls: Sequence[GenerateCall]) -> list[Completion]:
        return await asyncio.Future()

    making = asyncio.create_task(launched.go_on(group, lambda places: never))
    await played.asked.wait()
    await asyncio.sleep(0.01)
    making.cancel()
    with pytest.raises(asyncio.CancelledError):
        await making
    assert played.closed


async def test_an_issue_with_other_seeds_or_samples_is_not_what_was_begun() -> None:
    launched = PrelaunchedGroup(2, Played())
    assert launched.fits(attempts())
    assert not launched.fits(attempts(retry=1))
    assert not launched.fits(Issue(7, (AttemptId(7, 0, 0),)))
    await launched.cancel()
