# SPDX-License-Identifier: Apache-2.0
"""A rank's checkpoint on its way to disk, in a thread beside the work. One at a time; what goes wrong, `over` raises."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from relax_plugin_torch.checkpoint import Snapshot, unwritten


class Writing:
    """The background writing of one rank's checkpoints."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._last: Future[None] | None = None
        self._directory = ""

    def write(self, snapshot: Snapshot, directory: str) -> None:
        """Begin with it. The one before must be over."""
        self._last, self._directory = self._thread.submit(snapshot.write, Path(directory)), directory

    async def over(self) -> None:
        """Until it is on disk. Raises InfrastructureError where it can't be."""
        if self._last is None:
            return
        try:
            await asyncio.wrap_future(self._last)
        except OSError as error:
            raise unwritten(self._directory, error.strerror or str(error)) from error

    def stop(self) -> None:
        """Stop without waiting: a write that is half-way ends in its own time, and nobody counts on it."""
        self._thread.shutdown(wait=False, cancel_futures=True)
