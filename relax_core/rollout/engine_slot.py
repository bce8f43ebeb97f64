# SPDX-License-Identifier: Apache-2.0
"""One engine of a pool: its worker, what it runs, the version it proved. It starts, serves, is updated, is replaced."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from relax_core.api.engine import Delta, EngineSpec, FinishReason, GenerateRequest
from relax_core.api.trainer import Chosen
from relax_core.api.version import Version
from relax_core.api.weights import Manifest, Receipt
from relax_core.api.worker import Worker, Workers, WorkerSpec

START_S = 300.0
UPDATE_S = 300.0
ABORT_S = 60.0
SILENCE_S = 180.0
"""An engine that yields nothing for this long while it runs requests is taken for dead."""


@dataclass(slots=True)
class Pending:
    """A request under way, with the tokens it has so far: they outlive the engine that sampled them."""

    request: GenerateRequest
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish: FinishReason = ""
    error: str = ""

    def add(self, delta: Delta) -> None:
        self.tokens += delta.tokens
        self.log_probs += delta.log_probs
        self.versions += [min(delta.version, delta.oldest_cache)] * len(delta.tokens)
        self.finish, self.error = delta.finish, delta.error

    def remaining(self) -> GenerateRequest:
        """What is left to ask, on this engine or another: the prompt goes on with the tokens it got."""
        if not self.tokens:
            return self.request
        return replace(
            self.request,
            tokens=self.request.tokens + tuple(self.tokens),
            max_new_tokens=self.request.max_new_tokens - len(self.tokens),
        )


class EngineSlot:
    """An engine's place in the pool; the engine in it may be replaced."""

    def __init__(self, name: str, chosen: Chosen, spec: EngineSpec, worker: WorkerSpec, workers: Workers) -> None:
        self.name, self.chosen = name, chosen
        self._spec, self._worker_spec, self._workers = replace(spec, name=name), worker, workers
        self.worker: Worker | None = None
        self.version: Version = spec.version
        self.serving = False
        self.waits_for_weights = False
        """Started, but its weights are older than anything that may be sampled."""
        self.restarts = 0
        self.running: dict[str, Pending] = {}

    async def start(self) -> dict[str, Any]:
        """A fresh engine with the weights of the model folder; it does not serve before `serving` is set."""
        self.serving, self.version = False, self._spec.version
        (self.worker,) = await self._workers.start([self._worker_spec], START_S)
        facts: dict[str, Any] = await self.worker.call("start", self._spec, timeout_s=START_S)
        return facts

    async def update(self, manifest: Manifest, transport: Chosen) -> Receipt:
        if self.worker is None:
            raise RuntimeError(f"engine {self.name} was never started")
        receipt: Receipt = await self.worker.call("update_weights", manifest, transport, timeout_s=UPDATE_S)
        self.version = manifest.version
        return receipt

    async def run(self, batch: Sequence[Pending]) -> AsyncIterator[list[Pending]]:
        """Stream a batch, yielding requests as they end. Raises when the engine fails; the tokens got stay."""
        if self.worker is None:
            raise RuntimeError(f"engine {self.name} was never started")
        requests = [pending.remaining() for pending in batch]
        async for deltas in self.worker.stream("generate", requests, timeout_s=SILENCE_S):
            yield self._take(deltas)

    async def abort(self, ids: Sequence[str]) -> None:
        """End requests that nobody wants any more."""
        if self.worker is not None:
            await self.worker.call("abort", list(ids), timeout_s=ABORT_S)

    def _take(self, deltas: Sequence[Delta]) -> list[Pending]:
        ended = []
        for delta in deltas:
            self.running[delta.id].add(delta)
            if delta.finish:
                ended.append(self.running.pop(delta.id))
        return ended

    @property
    def work(self) -> int:
        return sum(p.request.max_new_tokens - len(p.tokens) for p in self.running.values())

    async def end(self) -> None:
        self.serving = False
        if self.worker is not None:
            await self.worker.kill()
