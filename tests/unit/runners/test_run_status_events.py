# SPDX-License-Identifier: Apache-2.0
"""Readers of a run status wait for what they read, not for something else that is written."""

from __future__ import annotations

import asyncio

from relax_core.api.events import EventsDropped, Logged, StepFinished, TimeSpent
from relax_core.api.role import Heartbeat, SystemClock
from relax_core.runners.run_status import KEPT_EVENTS, RunStatusService
from tests.unit.roles.virtual_time import VirtualClock, run_virtual


async def test_a_command_does_not_keep_readers_of_events_from_waiting() -> None:
    run_status = RunStatusService(SystemClock())
    await run_status.emit(Logged("info", "actor", "hello", {}))
    await run_status.command("actor", "stop", "SIGTERM")
    listener = asyncio.create_task(run_status.commands("actor", 0, 10.0))
    assert not listener.done()
    assert await run_status.events(1, 0.01) == ()
    assert [command.name for command in listener.result()] == ["stop"]


def test_beats_bring_time_that_goes_along_and_pushes_no_event_out() -> None:
    async def scene() -> None:
        clock = VirtualClock()
        run_status = RunStatusService(clock)
        await run_status.emit(StepFinished(1, {}))
        for beat in range(KEPT_EVENTS + 10):
            await run_status.heartbeat(Heartbeat("actor", "busy", sent=1.0 + beat))
        told = await run_status.events(0, 0.0)
        assert isinstance(told[0][1], StepFinished) and told[1][1] == EventsDropped(10)
        assert len(told) == 2 + KEPT_EVENTS
        assert [number for number, _ in told] == sorted(number for number, _ in told)
        start = clock.now()
        await run_status.heartbeat(Heartbeat("actor", "stopped", sent=1e6))
        (last,) = await run_status.events(told[-1][0], 2.0)
        assert isinstance(last[1], TimeSpent) and last[1].over and clock.now() - start == 2.0

    run_virtual(scene(), 1e3)
