# SPDX-License-Identifier: Apache-2.0
"""The calls to one engine of a pool and the life cycle of its worker process.

A slot only calls its engine. The router decides where requests run and whether the engine is replaced.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

from relax_core.api.component import Chosen
from relax_core.api.engine import Capabilities, Delta, EngineSpec, GenerateRequest, Health
from relax_core.api.errors import DeadlineExceeded, InfrastructureError, PluginError
from relax_core.api.plan import OffloadPart
from relax_core.api.role import SpanTrack, Worker, Workers, WorkerSpec
from relax_core.api.weights import Manifest, Receipt, Version
from relax_core.engines.engine_state import EngineState
from relax_core.observe.console import waiting_for
from relax_core.observe.spans import Unwatched
from relax_core.registry.error_text import said
from relax_core.registry.shapes import WrongShape, checked, shown

T = TypeVar("T")
START_S = 300.0
UPDATE_S = 300.0
ABORT_S = 60.0
PAUSE_S = 120.0
"""Deadline of pause and resume, in seconds; an engine answers after the current token of all its requests."""
OFFLOAD_S = 300.0
STOP_S = 5.0
"""Seconds that `close` waits for a running pause or offload before it stops the engine."""
SILENCE_S = 20.0
"""Seconds without an answer until an engine's health is checked, and seconds until the check counts as failed."""
UNBOUNDED_S = 1e9
"""Deadline of calls without a time limit: the router detects silent engines, and accounts for pauses."""
NO_CAPABILITIES = Capabilities()
NUMBERS = frozenset({int, float})


class EngineSlot:
    """One engine of a pool; the slot keeps its name when the engine's worker is replaced.

    Life cycle: `started -> serving <-> paused -> stopped`, then started with a new worker.

    Invariants:
    - `state.loaded` changes only after the receipt was accepted.
    - A newly started engine has the version of its spec, is not paused, and has nothing offloaded.
    - A call raises an error if the engine stops answering health checks, or returns another type than its contract has.
    """

    def __init__(
        self, name: str, chosen: Chosen, spec: EngineSpec, worker: WorkerSpec, workers: Workers,
        capabilities: Capabilities = NO_CAPABILITIES, track: SpanTrack | None = None, silence_s: float = SILENCE_S,
        address: str = "",
    ) -> None:  # fmt: skip
        """`address`: that of an engine that was started elsewhere; empty if `workers` start the engine."""
        self.address = address
        self._track, self._silence_s = track or Unwatched(), silence_s
        self.name, self.chosen, self.capabilities = name, chosen, capabilities
        self.spec, self._worker_spec, self._workers = replace(spec, name=name), worker, workers
        self.worker: Worker | None = None
        self.state = EngineState(name, loaded=spec.version)
        self.on_loading: Callable[[EngineSlot, Version], Awaitable[None]] | None = None
        """Called and awaited with this slot and each version before the engine loads it."""
        self._busy = self._started = False
        self._progress = asyncio.Event()
        self.pause_lock = asyncio.Lock()
        """Serialises pause, resume and offload."""
        self.update_lock = asyncio.Lock()
        """Serialises loads of weights."""
        self.offloaded: frozenset[OffloadPart] = frozenset()
        self.restarts = self.starts = 0
        """`restarts`: number of finished replacements. `starts`: number of worker starts, also of failed ones."""

    async def start(self) -> dict[str, Any]:
        """Start a new worker with the model folder's weights; return the engine's facts."""
        self.state.paused, self.state.loaded = False, self.spec.version
        self._started, self.offloaded = False, frozenset()
        self.starts += 1
        with self._track.span("overhead", "starting"), waiting_for(f"starting engine {self.name}"):
            (self.worker,) = await self._workers.start([self._worker_spec], START_S)
            facts = await self.worker.call("start", self.spec, timeout_s=START_S)
        try:
            checked(facts, Mapping[str, Any], "start()")
            for name in {"max_context", "vocab_size", "kv_tokens"} & facts.keys():
                checked(facts[name], float, f"start(): fact {name}")
        except WrongShape as error:
            raise PluginError(f"engine {self.chosen.name}", str(error)) from error
        self._started = True
        return dict(facts)

    async def leave(self, well: bool) -> None:
        """Stop the engine for good, as `close` does. A load of weights that is still running proves nothing."""
        self.starts += 1
        await self.close(well)
        self.set_busy(False)

    async def stop(self) -> None:
        """Kill the engine's process, which also frees its device memory."""
        self._started, self.offloaded = False, frozenset()
        if self.worker is not None:
            await self.worker.kill()

    async def close(self, well: bool) -> None:
        """Stop the engine: gracefully if `well`, else kill it.

        First wait up to `STOP_S` for a running pause or offload, which would otherwise be reported as a failure.
        """
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
        """Yield the deltas of a batch as they arrive. Raises if the engine fails or stops answering health checks."""
        stream = self._running_worker().stream("generate", requests, timeout_s=UNBOUNDED_S)
        try:
            while (deltas := await self._while_alive("generate", anext(stream, None))) is not None:
                yield deltas
        except NotImplementedError as error:
            raise PluginError(f"engine {self.chosen.name}", f"generate: {said(error)}") from error

    async def score(
        self, sequences: Sequence[Sequence[int]], temperature: float, timeout_s: float = UNBOUNDED_S
    ) -> Sequence[Sequence[float]]:
        """Return the log-prob of every token of each sequence, [sequences][tokens].

        Without `timeout_s` the call may take any time while the engine answers health checks.
        """
        track = self._track
        with track.span("work", "scoring") if timeout_s == UNBOUNDED_S else track.span("overhead", "scoring a canary"):
            found: Sequence[Sequence[float]] = await self._call(
                "score", [list(one) for one in sequences], temperature, timeout_s=timeout_s
            )
        rows = found if isinstance(found, list | tuple) else [None]
        if not all(isinstance(row, list | tuple) and NUMBERS.issuperset(map(type, row)) for row in rows):
            raise InfrastructureError(
                f"{self.name}: score() returned {shown(found)}; want numbers, [sequences][tokens]"
            )
        return found

    async def profile(self, path: str, max_bytes: int) -> None:
        """Record a profile until the engine's next update. Raises NotImplementedError if the engine can't record one."""
        await self._call("profile", path, max_bytes, timeout_s=ABORT_S)

    async def abort(self, ids: Sequence[str]) -> None:
        """Abort requests on this engine. Raises NotImplementedError if the engine can't abort."""
        if self.worker is not None:
            await self._call("abort", list(ids), timeout_s=ABORT_S)

    def set_busy(self, busy: bool) -> None:
        """Record whether the engine has requests; call this whenever requests arrive, get tokens or leave."""
        self._busy = busy
        self._progress.set()
        self._update_track()

    async def wait_progress(self, timeout_s: float) -> None:
        """Return when a request arrives, gets tokens or leaves, or after `timeout_s`."""
        self._progress.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._progress.wait()

    # -- weights, pauses, memory --------------------------------------------------------------------------------

    async def update(self, manifest: Manifest, transport: Chosen, timeout_s: float = UPDATE_S) -> Receipt:
        """Load a version and return the receipt; the caller sets `state.loaded` after it has accepted the receipt."""
        if self.on_loading is not None:
            await self.on_loading(self, manifest.version)
        with self._track.span("overhead", f"loading {manifest.version}"):
            receipt: Receipt = await self._call("update_weights", manifest, transport, timeout_s=timeout_s)
        return self._returned("update_weights", receipt, Receipt)

    async def pause(self) -> bool:
        """Stop sampling. Return False if the engine cannot keep paused requests, which must then be aborted."""
        self.state.paused = True
        self._update_track()
        with suppress(NotImplementedError):
            await self._call("pause", timeout_s=PAUSE_S)
            return True
        return False

    async def resume(self) -> None:
        with suppress(NotImplementedError):  # an engine without resume has no pause either
            await self._call("resume", timeout_s=PAUSE_S)
        self.state.paused = False
        self._update_track()

    async def offload(self, parts: frozenset[OffloadPart]) -> int:
        """Offload exactly `parts` and load all else; return the bytes freed, 0 for an engine that is not started.

        The engine must not run requests.
        """
        if not self._started:
            return 0
        freed = 0
        if to_offload := sorted(parts - self.offloaded):
            with self._track.span("overhead", f"offloading {' and '.join(to_offload)}"):
                answer = await self._call("offload", to_offload, timeout_s=OFFLOAD_S)
                freed = int(self._returned("offload", answer, int))
        if to_onload := sorted(self.offloaded - parts):
            with self._track.span("overhead", f"onloading {' and '.join(to_onload)}"):
                await self._call("onload", to_onload, timeout_s=OFFLOAD_S)
        self.offloaded = parts
        return freed

    def _update_track(self) -> None:
        self._track.say("generating" if self._busy and not self.state.paused else "")

    # -- calls --------------------------------------------------------------------------------------------------

    async def health(self, timeout_s: float) -> Health:
        health: Health = await self._running_worker().call("health", timeout_s=timeout_s)
        return self._returned("health", health, Health)

    async def _call(self, method: str, *args: Any, timeout_s: float) -> Any:
        return await self._while_alive(method, self._running_worker().call(method, *args, timeout_s=timeout_s))

    async def _while_alive(self, method: str, awaited: Awaitable[T]) -> T:
        """Await a long call while checking the engine's health; raise if a health check fails or gets no answer."""
        answer = asyncio.ensure_future(awaited)
        try:
            while not (await asyncio.wait({answer}, timeout=self._silence_s))[0]:
                try:
                    health = await self.health(self._silence_s)
                except DeadlineExceeded:
                    late = DeadlineExceeded(self.name, f"a health check during {method}", 2 * self._silence_s)
                    raise late from None
                if not health.ok:
                    failure = health.facts.get("failure", "")
                    raise InfrastructureError(f"{self.name}: unhealthy during {method}: {failure}")
            return answer.result()
        except LookupError as error:  # of the engine's own code
            raise PluginError(f"engine {self.chosen.name}", f"{method}: {said(error)}") from error
        finally:
            answer.cancel()
            await asyncio.gather(answer, return_exceptions=True)

    def _returned(self, method: str, value: T, wanted: Any) -> T:
        """Return what a method of the engine returned. Raises InfrastructureError if it has another type."""
        try:
            checked(value, wanted, f"{method}()")
        except WrongShape as error:
            raise InfrastructureError(f"{self.name}: {error}") from error
        return value

    def _running_worker(self) -> Worker:
        if self.worker is None:
            raise RuntimeError(f"engine {self.name} is not started; call start first")
        return self.worker
