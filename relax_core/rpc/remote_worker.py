# SPDX-License-Identifier: Apache-2.0
"""A worker at the other end of a connection: its calls and streams, with deadlines."""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from typing import Any

from relax_core.api.errors import DeadlineExceeded, WorkerDied
from relax_core.api.role import Clock
from relax_core.rpc.connection import Call, Connection


class RemoteWorker(ABC):
    """The calls of `api.role.Worker` over a connection. Subclasses say how the process ends."""

    def __init__(self, name: str, connection: Connection, clock: Clock) -> None:
        self.name = name
        self._connection, self._clock = connection, clock

    @abstractmethod
    async def _died(self, method: str, error: Exception) -> WorkerDied:
        """Return the error to raise when the connection ended during a call of `method`."""

    def serve(self, call: Call) -> None:
        """Answer the calls of the worker's process from now on. The process may run an author's code."""
        self._connection.serve_untrusted(call)

    async def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        start = self._clock.now()
        try:
            async with asyncio.timeout(timeout_s):
                return await self._connection.call(method, args)
        except TimeoutError:
            raise DeadlineExceeded(self.name, f"{method} to return", self._clock.now() - start) from None
        except ConnectionError as error:
            raise await self._died(method, error) from error

    async def stream(self, method: str, *args: Any, timeout_s: float) -> AsyncIterator[Any]:
        async with contextlib.aclosing(self._connection.stream(method, args)) as items:
            while True:
                start = self._clock.now()
                try:
                    async with asyncio.timeout(timeout_s):
                        item = await anext(items)
                except StopAsyncIteration:
                    return
                except TimeoutError:
                    waited = self._clock.now() - start
                    raise DeadlineExceeded(self.name, f"the next item of {method}", waited) from None
                except ConnectionError as error:
                    raise await self._died(method, error) from error
                yield item
