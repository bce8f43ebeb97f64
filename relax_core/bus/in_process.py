# SPDX-License-Identifier: Apache-2.0
"""The in-process bus: metadata and payloads in the memory of whoever opens it, the ledger on its local disk."""

from __future__ import annotations

import asyncio

from relax_core.api.bus import Bus, BusComponent, BusSettings
from relax_core.api.clock import Clock, SystemClock
from relax_core.api.version import Version
from relax_core.bus.journal import Journal
from relax_core.bus.queue import TransferQueue
from relax_core.bus.service import BusService
from relax_core.bus.store import MemoryStore


class InProcessBus(BusComponent):
    """Opens a `BusService` here; a directory with a ledger is continued from the version that was restored."""

    clock: Clock = SystemClock()

    async def open(self, settings: BusSettings, directory: str, version: Version) -> Bus:
        return BusService(*await asyncio.to_thread(restored, settings, directory, version), self.clock)


def restored(settings: BusSettings, directory: str, version: Version) -> tuple[TransferQueue, MemoryStore, Journal]:
    """The parts of a bus over a run's directory, with what its ledger remembers as of `version`."""
    journal = Journal(directory)
    try:
        return TransferQueue(settings, version, journal.remember(version)), MemoryStore(), journal
    except BaseException:
        journal.close()
        raise
