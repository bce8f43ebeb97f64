# SPDX-License-Identifier: Apache-2.0
"""Log-probs of given tokens from the engines of a pool: parts of what is asked go to the least busy engines.

An engine that dies, or gives what can't be log-probs, is not trusted any more, and its parts go to another one. Who asks
bounds the time.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import chain

from relax_core.api.errors import InfrastructureError, RelaxError
from relax_core.engines.router import Router
from relax_core.engines.slot import EngineSlot
from relax_core.engines.status import ROUNDING
from relax_core.rpc.waiting import start_all

MOST_TOKENS = 8192
"""Of one part, unless a single sequence is longer."""
AT_ONCE = 2
"""Parts that one engine has: while it computes one, the next is there."""

Sequences = Sequence[Sequence[int]]
Scores = Sequence[Sequence[float]]


class Scoring:
    """Of one pool."""

    def __init__(
        self, slots: Mapping[str, EngineSlot], router: Router, trusting: Callable[[EngineSlot], AbstractContextManager[None]]
    ) -> None:  # fmt: skip
        self._slots, self._router, self._trusting = slots, router, trusting
        self._running: Counter[str] = Counter()
        self._changed = asyncio.Event()
        self._broken: RelaxError | None = None

    def changed(self) -> None:
        """An engine may have come, or have less to do."""
        self._changed.set()

    def fail(self, error: RelaxError) -> None:
        """No engine can be had any more."""
        self._broken = error
        self._changed.set()

    async def score(self, sequences: Sequences, temperature: float, singly: bool = False) -> list[Sequence[float]]:
        """One list a sequence, in order. `singly`: one at a time, so that no result depends on what is beside it."""
        if singly:
            return [(await self._part([sequence], temperature))[0] for sequence in sequences]
        parts = await start_all(*(self._part(part, temperature) for part in _parts(sequences)))
        return list(chain.from_iterable(parts))

    async def _part(self, sequences: Sequences, temperature: float) -> Scores:
        while True:
            slot = await self._free()
            self._running[slot.name] += 1
            try:
                with self._trusting(slot):
                    found = _checked(slot, sequences, await slot.score(sequences, temperature))
                    self._router.engines[slot.name].failures = 0
                    return found
            finally:
                self._running[slot.name] -= 1
                self._changed.set()

    async def _free(self) -> EngineSlot:
        while True:
            if self._broken is not None:
                raise self._broken
            able = [
                name for name, engine in self._router.engines.items() if engine.able and self._running[name] < AT_ONCE
            ]
            if able:
                return self._slots[min(able, key=lambda name: (self._running[name], self._router.engines[name].work))]
            self._changed.clear()
            await self._changed.wait()


def _parts(sequences: Sequences) -> Iterator[Sequences]:
    part: list[Sequence[int]] = []
    tokens = 0
    for sequence in sequences:
        if part and tokens + len(sequence) > MOST_TOKENS:
            yield part
            part, tokens = [], 0
        part.append(sequence)
        tokens += len(sequence)
    if part:
        yield part


def _checked(slot: EngineSlot, sequences: Sequences, found: Scores) -> Scores:
    """Raise InfrastructureError for what can't be true."""
    if [len(scores) for scores in found] != [len(sequence) for sequence in sequences]:
        raise InfrastructureError(f"{slot.name} gave other numbers of log-probs than it was given tokens")
    for scores in found:
        if scores and not (sum(scores) > -math.inf and max(scores) <= ROUNDING):  # the sum of a NaN is one
            raise InfrastructureError(f"{slot.name} gave {min(scores)} and {max(scores)} as log-probs")
    return found
