# SPDX-License-Identifier: Apache-2.0
"""Which engine a request goes to: where its beginning is cached, unless that one is too busy; else the least busy.

The bound: a cache is worth as many tokens of work as it saves. No engine is given a request while it has more work than
the least busy one that may serve it by more than the request's own tokens so far.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TypeVar

from relax_core.rollout.engine_state import EngineState
from relax_core.rollout.requests import Pending

T = TypeVar("T")
MAX_KNOWN = 1 << 16
"""Sessions, and groups, whose homes are remembered; the oldest are forgotten first."""


class Homes:
    """Where sessions and groups have been. A cache is gone when its engine dies or gets other weights."""

    def __init__(self) -> None:
        self._sessions: dict[Hashable, tuple[str, int]] = {}
        self._groups: dict[Hashable, dict[str, int]] = {}

    def choose(self, able: Sequence[EngineState], pending: Pending, floor: int) -> EngineState | None:
        """None where no engine is at or above the floor."""
        least: EngineState | None = None
        for engine in able:
            if engine.step >= floor and (least is None or engine.work < least.work):
                least = engine
        if least is None or len(able) == 1:
            return least
        bound = least.work + len(pending.request.tokens) + len(pending.tokens)
        home = self._home(able, pending, floor, bound)
        return least if home is None else home

    def _home(self, able: Sequence[EngineState], pending: Pending, floor: int, bound: int) -> EngineState | None:
        session, cache = self._sessions.get(pending.session, ("", 0))
        group = self._groups.get(pending.group, {})
        if not session and not group:
            return None
        home: EngineState | None = None
        for engine in able:
            if engine.work > bound or engine.step < floor:
                continue
            if engine.name == session and engine.cache == cache:
                return engine
            if group.get(engine.name) == engine.cache and (home is None or engine.work < home.work):
                home = engine
        return home

    def note(self, pending: Pending, engine: EngineState) -> None:
        """It runs there."""
        if pending.session is not None:
            _newest_last(self._sessions, pending.session, (engine.name, engine.cache))
        if pending.group is not None:
            homes = self._groups.get(pending.group, {})
            homes[engine.name] = engine.cache
            _newest_last(self._groups, pending.group, homes)


def _newest_last(known: dict[Hashable, T], key: Hashable, value: T) -> None:
    known.pop(key, None)
    known[key] = value
    if len(known) > MAX_KNOWN:
        del known[next(iter(known))]
