# SPDX-License-Identifier: Apache-2.0
"""The status of a run: heartbeats, numbered events and commands, in memory only.

Readers pass the last number that they have seen and a deadline, so the same calls work within and between processes.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from heapq import merge
from operator import itemgetter

from relax_core.api.events import Event, EventsDropped, Span, StepFinished, TimeSpent
from relax_core.api.role import Clock, Heartbeat
from relax_core.api.run_commands import Command
from relax_core.rpc.waiting import TimedCondition

KEPT_EVENTS = 4096
"""Events kept in memory, more than a working controller lags behind by. Older events are in the run directory."""
FULL_S = 60.0
"""Seconds that an emitter waits while KEPT_EVENTS are unread; then the oldest event is dropped and counted."""


class RunStatusService:
    """The status of a run in memory: `api.role.RunStatus`.

    Invariants:
    - An unread event is dropped only after a later emitter has waited FULL_S for a reader. Every drop is counted: an
      `EventsDropped` takes the place of the last dropped event.
    - A reader that asks for events after a number has recorded all events up to that number.
    - A heartbeat never waits. Without a reader, the spans of the oldest heartbeats are dropped and counted.
    """

    def __init__(self, clock: Clock, controlled: bool = False) -> None:
        """Make an empty status. `controlled`: a controller will read the events, also those before its first read."""
        self._clock = clock
        self._clocks = ClockOffsets()
        self._heartbeats: dict[str, Heartbeat] = {}
        self._events: deque[tuple[int, Event]] = deque(maxlen=KEPT_EVENTS)
        self._spent: deque[tuple[int, Event]] = deque(maxlen=KEPT_EVENTS)
        """`TimeSpent` events, one per heartbeat. In a separate queue, they displace no event and wake no reader."""
        self._dropped: tuple[int, EventsDropped] | None = None
        """Number of the last dropped event, and an event that counts the drops that no reader has seen."""
        self._read, self._has_reader = 0, controlled
        """Number of the last event that the reader has recorded, and True if there is a reader."""
        self._commands: dict[str, list[tuple[int, Command]]] = {}
        self._numbers = 0
        self._changes = TimedCondition(clock)

    async def heartbeat(self, heartbeat: Heartbeat) -> None:
        shifted = self._clocks.translate(heartbeat, self._clock.now())
        self._heartbeats[heartbeat.role] = replace(shifted, spans=())
        if heartbeat.sent:
            ended = shifted.state in ("stopped", "failed")
            self._append(self._spent, TimeSpent(shifted.role, shifted.sent, shifted.spans, ended))

    async def heartbeats(self) -> tuple[Heartbeat, ...]:
        return tuple(self._heartbeats.values())

    async def emit(self, event: Event) -> None:
        if isinstance(event, StepFinished):
            event = replace(event, at=self._clock.now())
        await self._changes.wait_for(lambda _: None if self._full(self._events) else True, FULL_S)
        self._append(self._events, event)
        self._changes.notify()

    def _full(self, kept: deque[tuple[int, Event]]) -> bool:
        """Return True if one more event would displace an unread event."""
        return len(kept) == KEPT_EVENTS and kept[0][0] > self._read

    def _append(self, kept: deque[tuple[int, Event]], event: Event) -> None:
        if self._full(kept):
            number, dropped = self._dropped or (0, EventsDropped(0))
            unread = dropped.count if number > self._read else 0
            self._dropped = max(number, kept[0][0]), EventsDropped(unread + 1)
        self._numbers += 1
        kept.append((self._numbers, event))

    async def events(self, after: int, wait_s: float) -> tuple[tuple[int, Event], ...]:
        self._has_reader = True
        # Compare with the newest event, not with `_numbers`: commands have numbers, too, and would end each wait.
        if after > self._read:
            self._read = after
            self._changes.notify()  # emitters may be waiting for room
        kinds = (self._events, self._spent, [self._dropped] if self._dropped is not None else [])
        await self._changes.wait_for(lambda _: (bool(self._events) and self._events[-1][0] > after) or None, wait_s)
        return tuple(merge(*([each for each in kind if each[0] > after] for kind in kinds), key=itemgetter(0)))

    async def recorded(self, wait_s: float) -> bool:
        last = self._events[-1][0] if self._events and self._has_reader else 0
        return bool(await self._changes.wait_for(lambda _: self._read >= last or None, wait_s))

    async def command(self, role: str, command: Command) -> None:
        self._numbers += 1
        self._commands.setdefault(role, []).append((self._numbers, command))
        self._changes.notify()

    async def commands(self, role: str, after: int, wait_s: float) -> tuple[tuple[int, Command], ...]:
        def unread(now: float) -> tuple[tuple[int, Command], ...] | None:
            return tuple(each for each in self._commands.get(role, ()) if each[0] > after) or None

        return await self._changes.wait_for(unread, wait_s) or ()


class ClockOffsets:
    """The offset of each role's monotonic clock from the hub's clock. The clocks of different machines differ.

    A heartbeat is sent before it arrives, so the smallest difference seen is the best estimate; its error is the
    fastest transfer time. On one machine the offset is close to zero.
    """

    def __init__(self) -> None:
        self._shifts: dict[tuple[str, int], float] = {}
        self._ends: dict[str, float] = {}
        """End of each track's last span. The track's next span begins no earlier, even after an improved offset."""

    def translate(self, heartbeat: Heartbeat, now: float) -> Heartbeat:
        """Return the heartbeat with times on the hub's clock. Without `sent`, only the arrival time `at` is set."""
        if not heartbeat.sent:
            return replace(heartbeat, at=now)
        process = (heartbeat.role, heartbeat.pid)
        shift = self._shifts[process] = min(now - heartbeat.sent, self._shifts.get(process, now - heartbeat.sent))
        waits = tuple(
            replace(wait, since=wait.since + shift, deadline=wait.deadline + shift) for wait in heartbeat.waits
        )
        spans = tuple(self._shifted(span, shift) for span in heartbeat.spans)
        return replace(heartbeat, at=now, sent=heartbeat.sent + shift, waits=waits, spans=spans)

    def _shifted(self, span: Span, shift: float) -> Span:
        start = max(span.start + shift, self._ends.get(span.track, span.start + shift))
        end = self._ends[span.track] = max(span.end + shift, start)
        return replace(span, start=start, end=end)
