# SPDX-License-Identifier: Apache-2.0
"""What a role says of itself: waits with owner and deadline, its state, its answer to commands."""

from __future__ import annotations

import asyncio

import pytest

from relax_core.api.errors import DeadlineExceeded, LastingFailure
from relax_core.api.run_commands import Continue, Pause, Stop
from tests.unit.roles.virtual_time import run_virtual
from tests.unit.runners.conftest import Backstage


def test_a_wait_shows_in_the_beat_while_it_lasts(backstage: Backstage) -> None:
    async def scene() -> None:
        _, make = await backstage("actor")
        context = make(3)
        assert context.heartbeat().state == "starting"
        with context.waiting("rows", "rollout", 5.0), context.waiting("room", "the bus", 9.0):
            beat = context.heartbeat()
            assert (beat.role, beat.state, beat.registration) == ("actor", "waiting", 3)
            assert [(w.role, w.reason, w.blocked_by, w.since, w.deadline) for w in beat.waits] == [
                ("actor", "rows", "rollout", 0.0, 5.0), ("actor", "room", "the bus", 0.0, 9.0)
            ]  # fmt: skip
        context.doing("training", step=7)
        beat = context.heartbeat()
        assert (beat.state, beat.doing, beat.waits, beat.facts) == ("busy", "training", (), {"step": 7})

    run_virtual(scene())


def test_a_wait_ended_by_an_error_or_a_cancellation_is_not_reported(backstage: Backstage) -> None:
    async def scene() -> None:
        _, make = await backstage("actor")
        context = make(0)

        async def waits() -> None:
            with context.waiting("for ever", "nobody", 5.0):
                await asyncio.sleep(100)

        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                await waits()
        assert context.heartbeat().waits == ()

    run_virtual(scene())


def test_a_missed_deadline_names_the_role_the_reason_and_the_blocker(backstage: Backstage) -> None:
    async def scene() -> None:
        _, make = await backstage("actor")
        context = make(0)
        with context.waiting("4 groups", "rollout", 5.0) as wait:
            await asyncio.sleep(5.0)
            context.check(wait)
            await asyncio.sleep(0.5)
            with pytest.raises(DeadlineExceeded, match=r"actor waited 5\.5 s for 4 groups \(blocked by rollout\)"):
                context.check(wait)

    run_virtual(scene())


def test_a_pause_holds_and_a_stop_ends_it(backstage: Backstage) -> None:
    async def scene() -> list[float]:
        _, make = await backstage("actor")
        context, clock, passed = make(0), asyncio.get_running_loop().time, []

        async def work() -> None:
            for _ in range(3):
                await context.pause_point()
                passed.append(clock())
                await asyncio.sleep(1.0)

        working = asyncio.create_task(work())
        await asyncio.sleep(0.5)
        context.take(Pause())
        assert context.heartbeat().state != "paused"  # it works until it comes to its pause point
        await asyncio.sleep(9.1)
        beat = context.heartbeat()
        assert beat.state == "paused" and "a user, who paused the run" in beat.waits[0].reason
        context.take(Continue())
        await asyncio.sleep(0.6)
        context.take(Pause())
        context.take(Continue())
        await asyncio.sleep(0.3)
        context.take(Pause())
        await asyncio.sleep(9.1)
        context.take(Stop())
        await working
        assert context.stopping
        return passed

    assert run_virtual(scene()) == [0.0, 10.0, 20.0]


def test_a_requested_pause_past_its_deadline_ends_the_run_for_good(backstage: Backstage) -> None:
    """A supervisor would restart the run after another failure, and so continue it without a person."""

    async def scene() -> None:
        _, make = await backstage("actor")
        context = make(0)
        context.take(Pause())
        with pytest.raises(LastingFailure, match=r"a user, who paused the run.*relax resume"):
            await context.pause_point()

    run_virtual(scene(), 1e6)


def test_the_random_source_is_of_the_seed_the_role_and_its_registration(backstage: Backstage) -> None:
    async def scene() -> None:
        _, actor = await backstage("actor")
        first, again, restarted = (actor(n).random.random() for n in (0, 0, 1))
        assert first == again != restarted

    run_virtual(scene())
