# SPDX-License-Identifier: Apache-2.0
"""One engine of a pool and its worker: it starts, serves, is updated, is replaced.

It only speaks with the engine. Where requests run, and whether the engine is replaced, the router decides.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

from relax_core.api.component import Chosen
from relax_core.api.engine import Capabilities, Delta, EngineSpec, GenerateRequest, Health
from relax_core.api.errors import DeadlineExceeded, InfrastructureError
from relax_core.api.plan import OffloadPart
from relax_core.api.role import SpanTrack, Worker, Workers, WorkerSpec
from relax_core.api.weights import Manifest, Receipt, Version
from relax_core.observe.spans import Unwatched

T = TypeVar("T")
START_S = 300.0
UPDATE_S = 300.0
ABORT_S = 60.0
PAUSE_S = 120.0
"""An engine answers between two tokens of everything it runs."""
OFFLOAD_S = 300.0
STOP_S = 5.0
"""For a pause or offload to end before its engine is ended."""
SILENCE_S = 20.0
"""After so long without an answer an engine is asked for its health; where it does not answer in as long, it hangs."""
UNBOUNDED_S = 1e9
"""Deadline of calls that take as long as they take: the router watches for silence, and knows of pauses."""
NO_CAPABILITIES = Capabilities()


class EngineSlot:
    """Place of an engine in a pool: `started -> serving <-> paused -> stopped`, then started with a fresh worker.

    Invariants:
    - `version` is the last one that was proved; it changes when the receipt was accepted, and not before.
    - A fresh engine has the spec's version, is not paused, and has nothing offloaded.
    - No long call outlives the engine: one that answers no health check ends every call with an error.
    """

    def __init__(
        self, name: str, chosen: Chosen, spec: EngineSpec, worker: WorkerSpec, workers: Workers,
        capabilities: Capabilities = NO_CAPABILITIES, track: SpanTrack | None = None, silence_s: float = SILENCE_S,
    ) -> None:  # fmt: skip
        self._track, self._silence_s = track or Unwatched(), silence_s
        self.name, self.chosen, self.capabilities = name, chosen, capabilities
        self.spec, self._worker_spec, self._workers = replace(spec, name=name), worker, workers
        self.worker: Worker | None = None
        self.version: Version = spec.version
        self.paused = False
        """The engine samples nothing, and holds its requests where it can."""
        self.on_loading: Callable[[Version], Awaitable[None]] | None = None
        """Awaited with each version before the engine is asked to load it."""
        self._busy = self._started = False
        self._progress = asyncio.Event()
        self.pause_lock = asyncio.Lock()
        """One pause, resume or offload at a time."""
        self.offloaded: frozenset[OffloadPart] = frozenset()
        self.restarts = self.starts = 0
        """Times that it failed, and times that a worker of it was started: what was asked of one says nothing of the next."""
        self.loading = ""
        """The version it is asked to load now."""

    async def start(self) -> dict[str, Any]:
        """Start a fresh engine with the weights of the model folder."""
        self.paused, self.version = False, self.spec.version
        self._started, self.offloaded = False, frozenset()
        self.starts += 1
        with self._track.span("overhead", "starting"):
            (self.worker,) = await self._workers.start([self._worker_spec], START_S)
            facts: dict[str, Any] = await self.worker.call("start", self.spec, timeout_s=START_S)
        self._started = True
        return facts

    async def stop(self) -> None:
        """End the engine's process, which frees its memory: there is nothing left to offload."""
        self._started, self.offloaded = False, frozenset()
        if self.worker is not None:
            await self.worker.kill()

    async def close(self, well: bool) -> None:
        """End the engine, and let an engine that is well stop by itself. Wait for a pause or offload that runs now, which would
        look like a failure, but not for an engine that hangs."""
        with suppress(TimeoutError):
            async with asyncio.timeout(STOP_S), self.pause_lock:
                pass
        if well and self._started and self.worker is not None:
            self._started = False
            await self.worker.stop()
        else:
            await self.stop()

    # -- requests -----------------------------------------------------------------------------------------------

    async def generate(self, requests: tuple[GenerateRequest, ...]) -> AsyncIterator[Sequence[Delta]]:
        """Yield what the engine says of them, as it says it. Raises when it fails, or shows no life."""
        stream = self._running_worker().stream("generate", requests, timeout_s=UNBOUNDED_S)
        while (deltas := await self._while_alive("generate", anext(stream, None))) is not None:
            yield deltas

    async def score(
        self, sequences: Sequence[Sequence[int]], temperature: float, timeout_s: float = UNBOUNDED_S
    ) -> Sequence[Sequence[float]]:
        """Compute log-probs of given tokens; without a deadline, as long as the engine says that it lives."""
        track = self._track
        with track.span("work", "scoring") if timeout_s == UNBOUNDED_S else track.span("overhead", "scoring a canary"):
            found: Sequence[Sequence[float]] = await self._call(
                "score", [list(one) for one in sequences], temperature, timeout_s=timeout_s
            )
        return found

    async def abort(self, ids: Sequence[str]) -> None:
        """End requests that nobody wants any more, or not here. NotImplementedError where the engine can't."""
        if self.worker is not None:
            await self._call("abort", list(ids), timeout_s=ABORT_S)

    def set_busy(self, busy: bool) -> None:
        """Note whether it has requests; called whenever some came, got tokens or left."""
        self._busy = busy
        self._progress.set()
        self._update_track()

    async def wait_progress(self, timeout_s: float) -> None:
        """Return when requests got tokens or left, or after `timeout_s`."""
        self._progress.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._progress.wait()

    # -- weights, pauses, memory --------------------------------------------------------------------------------

    async def update(self, manifest: Manifest, transport: Chosen, timeout_s: float = UPDATE_S) -> Receipt:
        """Load a version; the caller sets `version` once the receipt was accepted."""
        if self.on_loading is not None:
            await self.on_loading(manifest.version)
        self.loading = str(manifest.version)
        try:
            with self._track.span("overhead", f"loading {manifest.version}"):
                receipt: Receipt = await self._call("update_weights", manifest, transport, timeout_s=timeout_s)
        finally:
            self.loading = ""
        return receipt

    async def pause(self) -> bool:
        """Sample nothing more. False where the engine can't hold requests: they must leave it."""
        self.paused = True
        self._update_track()
        with suppress(NotImplementedError):
            await self._call("pause", timeout_s=PAUSE_S)
            return True
        return False

    async def resume(self) -> None:
        with suppress(NotImplementedError):  # then it was never told to pause
            await self._call("resume", timeout_s=PAUSE_S)
        self.paused = False
        self._update_track()

    async def offload(self, parts: frozenset[OffloadPart]) -> int:
        """Offload exactly these parts of its memory, where it has started; bytes really freed. It runs nothing."""
        if not self._started:
            return 0
        freed = 0
        if to_sleep := sorted(parts - self.offloaded):
            with self._track.span("overhead", f"putting {' and '.join(to_sleep)} to sleep"):
                freed = int(await self._call("sleep", to_sleep, timeout_s=OFFLOAD_S))
        if to_wake := sorted(self.offloaded - parts):
            with self._track.span("overhead", f"waking {' and '.join(to_wake)}"):
                await self._call("wake", to_wake, timeout_s=OFFLOAD_S)
        self.offloaded = parts
        return freed

    def _update_track(self) -> None:
        self._track.say("generating" if self._busy and not self.paused else "")

    # -- calls --------------------------------------------------------------------------------------------------

    async def health(self, timeout_s: float) -> Health:
        health: Health = await self._running_worker().call("health", timeout_s=timeout_s)
        return health

    async def _call(self, method: str, *args: Any, timeout_s: float) -> Any:
        return await self._while_alive(method, self._running_worker().call(method, *args, timeout_s=timeout_s))

    async def _while_alive(self, method: str, awaited: Awaitable[T]) -> T:
        """Await an answer that may take long; an engine that meanwhile shows no life is not waited for."""
        answer = asyncio.ensure_future(awaited)
        try:
            while not (await asyncio.wait({answer}, timeout=self._silence_s))[0]:
                try:
                    health = await self.health(self._silence_s)
                except DeadlineExceeded:
                    late = DeadlineExceeded(self.name, f"a sign of life during {method}", 2 * self._silence_s)
                    raise late from None
                if not health.ok:
                    failure = health.facts.get("failure", "")
                    raise InfrastructureError(f"{self.name}: not well during {method}: {failure}")
            return answer.result()
        finally:
            answer.cancel()
            await asyncio.gather(answer, return_exceptions=True)

    def _running_worker(self) -> Worker:
        if self.worker is None:
            raise RuntimeError(f"engine {self.name} was never started")
        return self.worker
