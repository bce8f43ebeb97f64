# SPDX-License-Identifier: Apache-2.0
"""Turns of who shares no device with anybody: at once, never wanted, and without asking anybody."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

from relax_core.api.turn import Part, Phase, Sleeper, Turn


class Alone:
    """`api.turn.Turn` on devices that nobody else has."""

    async def wanted(self) -> None:
        await asyncio.Event().wait()


class Unshared:
    """`api.turn.Turns` of a role without neighbours."""

    async def join(self, name: str, devices: frozenset[str], sleeper: Sleeper) -> None:
        """Nobody needs to know."""

    async def leave(self, name: str) -> None:
        """Nobody needs to know."""

    @asynccontextmanager
    async def acquire(
        self, devices: frozenset[str], phase: Phase, holders: Mapping[str, Sequence[Part]], deadline_s: float
    ) -> AsyncIterator[Turn]:
        yield Alone()
