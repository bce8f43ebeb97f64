# SPDX-License-Identifier: Apache-2.0
"""Workers without processes: their hosts run on this event loop and in threads of this process.

For tests and benchmarks of small models, in which starting a process takes longer than its work. These workers cannot
be killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Sequence
from typing import Any

from relax_core.api.errors import ConfigError
from relax_core.api.role import Worker, WorkerSpec
from relax_core.rpc.host import Builder, Host, free_port


class InProcessWorker:
    """`api.role.Worker` of a host in this process."""

    def __init__(self, spec: WorkerSpec, host: Host) -> None:
        self.name, self.pid, self.host = spec.name, os.getpid(), "127.0.0.1"
        self._host = host

    async def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        async with asyncio.timeout(timeout_s):
            return await self._host.call(method, args)

    async def stream(self, method: str, *args: Any, timeout_s: float) -> AsyncIterator[Any]:
        async for item in self._host.stream(method, args):
            yield item

    async def free_port(self, address: str) -> int:
        return free_port(address)

    @property
    def alive(self) -> bool:
        return True

    async def stop(self, timeout_s: float = 5.0) -> None:
        with contextlib.suppress(ConfigError):  # the hosted component may have no `stop`
            await self.call("stop", timeout_s=timeout_s)

    async def kill(self) -> None:
        """Do nothing; the host is freed with its last reference."""


class InProcessWorkers:
    """`api.role.Workers` that run in this process."""

    def __init__(self, builder: Builder) -> None:
        self._builder = builder

    async def start(self, specs: Sequence[WorkerSpec], timeout_s: float = 120.0) -> tuple[Worker, ...]:
        return tuple(InProcessWorker(spec, Host.make(spec.component, spec.target, self._builder)) for spec in specs)
