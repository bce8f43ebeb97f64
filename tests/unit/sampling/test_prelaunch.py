# SPDX-License-Identifier: Apache-2.0
"""A group that is begun before its issue: no turn before the grant, no sample after a cancel."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import cast

import pytest

from relax_core.api.batch import AttemptId
from relax_core.api.bus import Issue
from relax_core.api.task import Task
from relax_core.api.trajectory import Outcome, Trajectory
from relax_core.api.weights import Version
from relax_core.engines.pool import EnginePool
from relax_core.engines.requests import PendingRequest
from relax_core.sampling.groups import InflightGroup, Turns
from relax_core.sampling.prelaunch import PrelaunchedGroup

TURN = PendingRequest((1,), 9, place=1)


class Played:
    """Two samples: the first fails as it starts, the second takes one turn."""

    def __init__(self) -> None:
        self.asked, self.closed = asyncio.Event(), False

    async def play(self, turns: Turns) -> Sequence[Trajectory]:
        turns.sample_started(0)
        turns.sample_ended()
        turns.sample_started(1)
        self.asked.set()
        try:
            await turns.generate([TURN])
            turns.sample_ended()
            return [Trajectory((), "", (), Outcome.ENVIRONMENT_ERROR), Trajectory((), "", ())]
        finally:
            self.closed = True


def attempts(retry: int = 0) -> Issue:
    return Issue(7, (AttemptId(7, 0, retry), AttemptId(7, 1, retry)), retry)


class Engines:
    """Notes what it is asked, and answers if told to."""

    def __init__(self, answering: bool) -> None:
        self.asked, self.answering = list[PendingRequest](), answering

    async def generate(self, requests: Sequence[PendingRequest]) -> None:
        self.asked += requests
        if not self.answering:
            await asyncio.Future()


def launch(played: Played) -> PrelaunchedGroup:
    launched = PrelaunchedGroup(2)
    launched.launch(played.play(launched))
    return launched


def issued(engines: Engines) -> InflightGroup:
    return InflightGroup(attempts(), Task("1", "a"), Version("actor", 0, 4), cast(EnginePool, engines))


async def test_turns_wait_for_the_grant_and_are_then_those_of_the_issued_group() -> None:
    played, engines = Played(), Engines(answering=True)
    launched = launch(played)
    await played.asked.wait()
    await asyncio.sleep(0.01)
    group = issued(engines)
    assert not engines.asked
    trajectories = await launched.go_on(group)
    assert engines.asked == [TURN]
    assert (TURN.session, TURN.floor) == (group.issue.attempts[1], 4)
    assert len(trajectories) == group.num_ended == 2, "one had ended before"


async def test_a_cancelled_prelaunch_is_closed_before_and_after_the_grant() -> None:
    played = Played()
    launched = launch(played)
    await played.asked.wait()
    await launched.cancel()
    assert played.closed

    played = Played()
    launched = launch(played)
    making = asyncio.create_task(launched.go_on(issued(Engines(answering=False))))
    await played.asked.wait()
    await asyncio.sleep(0.01)
    making.cancel()
    with pytest.raises(asyncio.CancelledError):
        await making
    assert played.closed


async def test_an_issue_with_other_seeds_or_samples_is_not_what_was_begun() -> None:
    launched = launch(Played())
    assert launched.fits(attempts())
    assert not launched.fits(attempts(retry=1))
    assert not launched.fits(Issue(7, (AttemptId(7, 0, 0),)))
    await launched.cancel()
