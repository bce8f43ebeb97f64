# SPDX-License-Identifier: Apache-2.0
"""Puts what roles tell in their own monotonic seconds on the hub's clock: processes on other machines have other ones.

A beat is made before it arrives, so the smallest difference seen is the nearest to the truth, and late by the quickest
transfer at most. Nothing is asked of anybody, and on one machine it changes next to nothing.
"""

from __future__ import annotations

from dataclasses import replace

from relax_core.api.status import Beat, Span


class Clocks:
    """The difference to each role's clock."""

    def __init__(self) -> None:
        self._shifts: dict[tuple[str, int], float] = {}
        self._ends: dict[str, float] = {}
        """Of each lane's last span: a better difference must not let the next one overlap it."""

    def translate(self, beat: Beat, now: float) -> Beat:
        """The beat in the hub's seconds; one that does not tell when it was made is as it is."""
        if not beat.sent:
            return replace(beat, at=now)
        whose = (beat.role, beat.pid)
        shift = self._shifts[whose] = min(now - beat.sent, self._shifts.get(whose, now - beat.sent))
        waits = tuple(replace(wait, since=wait.since + shift, deadline=wait.deadline + shift) for wait in beat.waits)
        spans = tuple(self._placed(span, shift) for span in beat.spans)
        return replace(beat, at=now, sent=beat.sent + shift, waits=waits, spans=spans)

    def _placed(self, span: Span, shift: float) -> Span:
        start = max(span.start + shift, self._ends.get(span.lane, span.start + shift))
        end = self._ends[span.lane] = max(span.end + shift, start)
        return replace(span, start=start, end=end)
