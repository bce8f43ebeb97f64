# SPDX-License-Identifier: Apache-2.0
"""The in-process bus: payloads in the memory of the process that hosts it."""

from __future__ import annotations

from relax_core.api.bus import BusComponent, PayloadStore
from relax_core.bus.store import MemoryStore


class InProcessBus(BusComponent):
    """What a run on one machine needs."""

    async def open_store(self) -> PayloadStore:
        return MemoryStore()
