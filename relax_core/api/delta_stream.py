# SPDX-License-Identifier: Apache-2.0
"""What one `generate` call waits on, for engines that decode in a thread: deltas cross to the event loop, in order."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable, Sequence

from relax_core.api.engine import Delta


class Stream:
    """Made on the event loop, fed by the decoding thread."""

    def __init__(self, ids: Iterable[str]) -> None:
        self._loop = asyncio.get_running_loop()
        self._items: asyncio.Queue[Sequence[Delta] | Exception] = asyncio.Queue()
        self.unfinished = set(ids)

    def post(self, item: Sequence[Delta] | Exception) -> None:
        """From the decoding thread."""
        # The loop may close at any moment; then nobody is left to tell.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._items.put_nowait, item)

    async def items(self) -> AsyncIterator[Sequence[Delta]]:
        """Deltas until every request has finished; all that have come by now at once."""
        while self.unfinished:
            # Its owner is the decoding thread, which posts deltas or its own failure; callers bound the silence.
            waiting = [await self._items.get()]
            while not self._items.empty():
                waiting.append(self._items.get_nowait())
            deltas = [delta for item in waiting if not isinstance(item, Exception) for delta in item]
            self.unfinished -= {delta.id for delta in deltas if delta.finish}
            if deltas:
                yield deltas
            if isinstance(waiting[-1], Exception):
                raise waiting[-1]
