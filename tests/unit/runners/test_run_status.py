# SPDX-License-Identifier: Apache-2.0
"""The run status in virtual time: what is reported is read once, waits end when they should, cancellation always ends."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings, strategies as st

from relax_core.api.events import Event, EventsDropped, Logged, StepFinished, TimeSpent
from relax_core.api.role import Heartbeat, SystemClock
from relax_core.api.run_commands import Pause, Stop
from relax_core.runners.run_status import FULL_S, KEPT_EVENTS, RunStatusService
from tests.unit.roles.virtual_time import VirtualClock, run_virtual


def said(number: int) -> Logged:
    return Logged("info", "actor", str(number))


def test_an_empty_handed_reader_returns_at_its_deadline() -> None:
    async def scene() -> float:
        run_status = RunStatusService(VirtualClock())
        await run_status.command("rollout", Stop())
        assert await run_status.events(0, 2.5) == ()
        assert await run_status.commands("actor", 0, 2.5) == ()
        return asyncio.get_running_loop().time()

    assert run_virtual(scene()) == pytest.approx(5.0)


def test_a_command_reaches_its_role_at_once_and_no_other() -> None:
    async def scene() -> None:
        run_status = RunStatusService(VirtualClock())
        listening = [asyncio.create_task(run_status.commands(role, 0, 9.0)) for role in ("actor", "rollout")]
        await asyncio.sleep(1.0)
        await run_status.command("actor", Pause())
        (heard,), nothing = await asyncio.gather(*listening)
        assert (heard[1], nothing) == (Pause(), ())
        assert await run_status.commands("actor", heard[0], 0.0) == ()

    run_virtual(scene())


def test_only_the_last_heartbeat_of_a_role_is_kept_stamped_with_the_services_own_time() -> None:
    async def scene() -> None:
        run_status = RunStatusService(VirtualClock())
        await run_status.heartbeat(Heartbeat("actor", "starting", at=99.0))
        await asyncio.sleep(2.0)
        await run_status.heartbeat(Heartbeat("actor", "busy"))
        assert [(beat.state, beat.at) for beat in await run_status.heartbeats()] == [("busy", 2.0)]

    run_virtual(scene())


def test_unread_events_are_bounded() -> None:
    async def scene() -> None:
        run_status = RunStatusService(VirtualClock())
        for number in range(KEPT_EVENTS + 10):
            await run_status.emit(said(number))
        (lost_at, lost), *kept = await run_status.events(0, 0.0)
        assert len(kept) == KEPT_EVENTS and kept[0][0] == 11
        assert (lost_at, lost) == (10, EventsDropped(10)), "and how many are lost is told in their place"

    run_virtual(scene())


def test_an_event_counts_as_recorded_once_the_reader_asks_for_later_ones() -> None:
    async def scene() -> None:
        clock = VirtualClock()
        run_status = RunStatusService(clock)
        await run_status.emit(said(0))
        assert await run_status.recorded(9.0) and clock.now() == 0.0, "nobody reads"
        ((number, _),) = await run_status.events(0, 0.0)
        assert not await run_status.recorded(9.0) and clock.now() == 9.0, "it was read, and need not have been written"
        waiting = asyncio.create_task(run_status.recorded(9.0))
        await asyncio.sleep(1.0)
        await run_status.emit(said(1))
        assert len(await run_status.events(number, 0.0)) == 1
        assert await waiting and clock.now() == 10.0, "what came later is not waited for"

    run_virtual(scene(), 60.0)


def test_a_full_buffer_holds_emitters_until_it_is_read_and_nothing_is_lost() -> None:
    async def scene() -> None:
        run_status, total, got = RunStatusService(VirtualClock()), KEPT_EVENTS + 500, list[tuple[int, Event]]()
        emitting = asyncio.create_task(emit_all(run_status, total))
        await asyncio.sleep(FULL_S / 2)
        assert not emitting.done()
        while not emitting.done() or len(got) < total:
            got += await run_status.events(got[-1][0] if got else 0, 1.0)
        assert [event for _, event in got] == [said(number) for number in range(total)]
        assert [number for number, _ in got] == sorted({number for number, _ in got})

    run_virtual(scene(), 100.0)


@settings(max_examples=20, deadline=None)
@given(
    bursts=st.lists(st.integers(0, 2500), min_size=2, max_size=6), reads=st.lists(st.booleans(), min_size=6, max_size=6)
)
def test_every_event_is_read_once_or_counted_as_dropped(bursts: list[int], reads: list[bool]) -> None:
    """A reader that pauses for longer than emitters wait misses events, and is told how many each time."""

    async def scene() -> None:
        run_status, got, total = RunStatusService(VirtualClock()), list[tuple[int, Event]](), 0
        tasks = []
        for burst, read in zip(bursts, reads, strict=False):
            for _ in range(burst // 100):  # of several emitters, each held for itself
                tasks.append(asyncio.create_task(emit_all(run_status, 100, total)))
                total += 100
            await asyncio.sleep(FULL_S + 1.0)
            if read:
                got += await run_status.events(got[-1][0] if got else 0, 0.0)
        while not all(task.done() for task in tasks):
            got += await run_status.events(got[-1][0] if got else 0, 1.0)
        got += await run_status.events(got[-1][0] if got else 0, 0.0)
        lost = sum(event.count for _, event in got if isinstance(event, EventsDropped))
        told = [event for _, event in got if not isinstance(event, EventsDropped)]
        assert len(told) == len({event.message for event in told if isinstance(event, Logged)}) == total - lost
        assert [number for number, _ in got] == sorted({number for number, _ in got})

    run_virtual(scene(), 1e6)


async def emit_all(run_status: RunStatusService, count: int, first: int = 0) -> None:
    for number in range(first, first + count):
        await run_status.emit(said(number))


def test_events_from_before_the_first_read_are_waited_for() -> None:
    """Steps are done, and a checkpoint of them is ready to be named, before the controller has read anything."""

    async def scene() -> None:
        run_status = RunStatusService(VirtualClock(), controlled=True)
        await run_status.emit(said(1))
        assert not await run_status.recorded(5.0)
        waiting = asyncio.create_task(run_status.recorded(5.0))
        ((last, _),) = await run_status.events(0, 0.0)
        await asyncio.sleep(0)
        assert not waiting.done(), "given to the controller is not written down"
        await run_status.events(last, 0.0)
        assert await waiting

    run_virtual(scene(), 100.0)


@settings(max_examples=40, deadline=None)
@given(
    cancel_after=st.integers(0, 12),
    emits=st.lists(st.integers(0, 6), max_size=6),
    wait_s=st.sampled_from([0.0, 0.5, 3.0]),
)
def test_a_cancelled_reader_always_ends(cancel_after: int, emits: list[int], wait_s: float) -> None:
    """Cancelled after any number of turns of the loop, while others emit at any turn."""

    async def scene() -> None:
        run_status = RunStatusService(VirtualClock())

        async def read() -> None:
            last = 0
            while True:
                for last, _ in await run_status.events(last, wait_s):
                    pass
                await asyncio.sleep(0)

        reading = asyncio.create_task(read())
        for turn in range(cancel_after):
            for _ in range(emits.count(turn)):
                await run_status.emit(said(turn))
            await asyncio.sleep(0)
        await run_status.emit(said(-1))
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading

    run_virtual(scene(), 10.0)


async def test_a_command_does_not_keep_readers_of_events_from_waiting() -> None:
    run_status = RunStatusService(SystemClock())
    await run_status.emit(said(0))
    await run_status.command("actor", Stop())
    listener = asyncio.create_task(run_status.commands("actor", 0, 10.0))
    assert not listener.done()
    assert await run_status.events(1, 0.01) == ()
    assert [command for _, command in listener.result()] == [Stop()]


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
