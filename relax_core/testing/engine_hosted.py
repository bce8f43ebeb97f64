# SPDX-License-Identifier: Apache-2.0
"""An engine in a worker process, as in production; for suites of engines that allow only one instance per process."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, ClassVar

from relax_core.api.component import Chosen
from relax_core.api.engine import Capabilities, Delta, Engine, EngineSpec, GenerateRequest, Health
from relax_core.api.errors import InfrastructureError
from relax_core.api.options import Options
from relax_core.api.role import Worker, WorkerSpec
from relax_core.api.weights import Manifest, Receipt, Version
from relax_core.runners.local.workers import LocalWorkers

START_S, CALL_S = 600.0, 120.0


class HostedEngine(Engine[Options]):
    """An engine that forwards all calls to a worker process, which hosts the component with this name."""

    capabilities: ClassVar[Capabilities] = Capabilities()

    def __init__(self, name: str, capabilities: Capabilities, options: Mapping[str, Any] | None = None) -> None:
        super().__init__(None)
        self.capabilities = capabilities  # type: ignore[misc]
        self._chosen = Chosen("engine", name, dict(options or {}))
        self._worker: Worker | None = None

    async def start(self, spec: EngineSpec) -> Mapping[str, Any]:
        path = os.pathsep.join(entry for entry in sys.path if entry)
        worker = WorkerSpec(spec.name, self._chosen, python=sys.executable, env={"PYTHONPATH": path})
        (self._worker,) = await LocalWorkers().start([worker], START_S)
        facts: Mapping[str, Any] = await self._worker.call("start", spec, timeout_s=START_S)
        return facts

    async def generate(self, requests: Sequence[GenerateRequest]) -> AsyncIterator[Sequence[Delta]]:
        async for deltas in self._there().stream("generate", list(requests), timeout_s=CALL_S):
            yield deltas

    async def score(self, sequences: Sequence[Sequence[int]], temperature: float = 1.0) -> Sequence[Sequence[float]]:
        scores: Sequence[Sequence[float]] = await self._call("score", sequences, temperature)
        return scores

    async def update_weights(self, manifest: Manifest, transport: Chosen) -> Receipt:
        receipt: Receipt = await self._call("update_weights", manifest, transport)
        return receipt

    async def pause(self) -> None:
        await self._call("pause")

    async def resume(self) -> None:
        await self._call("resume")

    async def abort(self, ids: Sequence[str]) -> None:
        await self._call("abort", list(ids))

    async def offload(self, parts: Sequence[str]) -> int:
        return int(await self._call("offload", list(parts)))

    async def onload(self, parts: Sequence[str]) -> None:
        await self._call("onload", list(parts))

    async def health(self) -> Health:
        if self._worker is None:
            return Health(False, Version("actor", 0, 0), facts={"failure": "its process has ended"})
        health: Health = await self._call("health")
        return health

    async def stop(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            await worker.call("stop", timeout_s=CALL_S)
            await worker.stop()

    async def _call(self, method: str, *args: Any) -> Any:
        return await self._there().call(method, *args, timeout_s=CALL_S)

    def _there(self) -> Worker:
        if self._worker is None:
            raise InfrastructureError("the engine has stopped and its process has ended; start another engine")
        return self._worker
