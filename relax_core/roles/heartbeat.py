# SPDX-License-Identifier: Apache-2.0
"""Notices ranks that hang while others work or wait for them: each answers a ping however busy it is, or is killed.

A rank that ended is noticed by its connection at once; this is for one that was stopped, or whose process is stuck.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from relax_core.api.errors import DeadlineExceeded, RelaxError, WorkerDied
from relax_core.api.worker import Worker

EVERY_S = 5.0
"""Between pings, and before the first: most calls are over by then."""
SILENT_S = 15.0
"""Without an answer a process is given up: longer than any library holds the interpreter."""


class Heartbeat:
    """Those of some workers that were found to hang."""

    def __init__(self, workers: Sequence[Worker]) -> None:
        self._workers = workers
        self._silent: dict[int, WorkerDied] = {}

    @asynccontextmanager
    async def during(self, method: str) -> AsyncIterator[None]:
        """Listen while this call of theirs lasts."""
        listeners = [asyncio.create_task(self._listen(rank, method)) for rank in range(len(self._workers))]
        try:
            yield
        finally:
            for listener in listeners:
                listener.cancel()
            await asyncio.gather(*listeners, return_exceptions=True)

    def why(self, rank: int, error: BaseException | None) -> BaseException | None:
        """What to say of a rank whose call ended so."""
        return self._silent.get(rank, error)

    async def _listen(self, rank: int, method: str) -> None:
        worker = self._workers[rank]
        with contextlib.suppress(RelaxError):  # what else is wrong with it, its own call says
            while True:
                await asyncio.sleep(EVERY_S)
                try:
                    await worker.call("ping", timeout_s=SILENT_S)
                except DeadlineExceeded:
                    said = f"worker {worker.name} (pid {worker.pid}) gave no sign of life for {SILENT_S:.0f} s during {method}"
                    self._silent[rank] = WorkerDied(f"{said} and was killed; its log is logs/{worker.name}.log")
                    await worker.kill()
                    return
