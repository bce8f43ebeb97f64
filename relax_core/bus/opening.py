# SPDX-License-Identifier: Apache-2.0
"""A run's bus, opened: the state machine over its directory, and the payload store that its component gives.

A directory with a ledger is continued from the version that was restored.
"""

from __future__ import annotations

import asyncio

from relax_core.api.bus import BusComponent, BusSettings
from relax_core.api.clock import Clock, SystemClock
from relax_core.api.version import Version
from relax_core.bus.journal import Journal
from relax_core.bus.queue import TransferQueue
from relax_core.bus.records import Remembered
from relax_core.bus.service import BusService


async def open_bus(
    component: BusComponent, settings: BusSettings, directory: str, version: Version, clock: Clock | None = None
) -> BusService:
    """The whole bus of a run, in this process."""
    journal, remembered = await asyncio.to_thread(_restored, directory, version)
    try:
        queue = TransferQueue(settings, version, remembered)
        store = await component.open_store()
    except BaseException:
        journal.close()
        raise
    return BusService(queue, store, journal, clock or SystemClock(), dict(remembered.notes))


def _restored(directory: str, version: Version) -> tuple[Journal, Remembered]:
    """With what the ledger remembers as of `version`."""
    journal = Journal(directory)
    try:
        return journal, journal.remember(version)
    except BaseException:
        journal.close()
        raise
