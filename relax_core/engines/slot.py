# SPDX-License-Identifier: Apache-2.0
"""One engine of a pool: its worker, and the version it proved. It starts, serves, is updated, is replaced.

It only speaks with the engine. What it runs, and whether it is trusted, the router knows.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from relax_core.api.devices import OffloadPart
from relax_core.api.engine import Capabilities, Delta, EngineSpec, GenerateRequest, Health
from relax_core.api.errors import DeadlineExceeded, InfrastructureError
from relax_core.api.role import SpanTrack
from relax_core.api.trainer import Chosen
from relax_core.api.weights import Canary, Manifest, Receipt, Version
from relax_core.api.worker import Worker, Workers, WorkerSpec
from relax_core.observe.spans import Unwatched

START_S = 300.0
UPDATE_S = 300.0
ABORT_S = 60.0
PAUSE_S = 120.0
"""An engine answers between two tokens of everything it runs."""
REST_S = 300.0
SILENCE_S = 20.0
"""After so long without an answer an engine is asked whether it lives; where it does not say so in as long, it hangs."""
LONGEST_S = 1e9
"""Of a stream's own deadline: silence is watched by the router, which knows of pauses."""


NOTHING_SAID = Capabilities()


class EngineSlot:
    """An engine's place in the pool; the engine in it may be replaced."""

    def __init__(
        self, name: str, chosen: Chosen, spec: EngineSpec, worker: WorkerSpec, workers: Workers,
        capabilities: Capabilities = NOTHING_SAID, lane: SpanTrack | None = None, silence_s: float = SILENCE_S,
    ) -> None:  # fmt: skip
        self._lane, self._silence_s = lane or Unwatched(), silence_s
        self.name, self.chosen, self.capabilities = name, chosen, capabilities
        self._spec, self._worker_spec, self._workers = replace(spec, name=name), worker, workers
        self.worker: Worker | None = None
        self.version: Version = spec.version
        self.paused = False
        """It samples nothing, and holds its requests where it can."""
        self.on_loading: Callable[[int], None] = _unheard
        """Told the step of each version that it is asked to load, before it is."""
        self._busy = False
        self._stirred = asyncio.Event()
        self.settling = asyncio.Lock()
        """One pause or resume at a time."""
        self._up = False
        self.asleep: frozenset[OffloadPart] = frozenset()
        self.restarts = 0
        self.loading = ""
        """The version it is asked to load now."""

    async def start(self) -> dict[str, Any]:
        """A fresh engine with the weights of the model folder."""
        self.paused, self.version = False, self._spec.version
        self._up, self.asleep = False, frozenset()
        with self._lane.span("overhead", "starting"):
            (self.worker,) = await self._workers.start([self._worker_spec], START_S)
            facts: dict[str, Any] = await self.worker.call("start", self._spec, timeout_s=START_S)
        self._up = True
        return facts

    async def update(self, manifest: Manifest, transport: Chosen, timeout_s: float = UPDATE_S) -> Receipt:
        """Load a version; `version` changes when the receipt was accepted, and not before."""
        self.loading = str(manifest.version)
        self.on_loading(manifest.version.step)
        try:
            with self._lane.span("overhead", f"loading {manifest.version}"):
                receipt: Receipt = await self._call("update_weights", manifest, transport, timeout_s=timeout_s)
        finally:
            self.loading = ""
        return receipt

    async def ask(self, canary: Canary, timeout_s: float) -> Sequence[float]:
        """What the engine makes of a canary."""
        with self._lane.span("overhead", "scoring a canary"):
            (log_probs,) = await self._call("score", [canary.tokens], canary.temperature, timeout_s=timeout_s)
        found: Sequence[float] = log_probs
        return found

    async def score(self, sequences: Sequence[Sequence[int]], temperature: float) -> Sequence[Sequence[float]]:
        """Log-probs of given tokens, as long as the engine says that it lives."""
        found: Sequence[Sequence[float]]
        with self._lane.span("work", "scoring"):
            found = await self._call("score", [list(one) for one in sequences], temperature, timeout_s=LONGEST_S)
        return found

    async def health(self, timeout_s: float) -> Health:
        if self.worker is None:
            raise RuntimeError(f"engine {self.name} was never started")
        health: Health = await self.worker.call("health", timeout_s=timeout_s)
        return health

    async def generate(self, requests: tuple[GenerateRequest, ...]) -> AsyncIterator[Sequence[Delta]]:
        """What the engine says of them, as it says it. Raises when it fails, or does not say that it lives."""
        if self.worker is None:
            raise RuntimeError(f"engine {self.name} was never started")
        stream = self.worker.stream("generate", requests, timeout_s=LONGEST_S)
        while (deltas := await self._next(stream)) is not None:
            yield deltas

    async def _next(self, stream: AsyncIterator[Sequence[Delta]]) -> Sequence[Delta] | None:
        """What the engine says next; None at its end."""
        word = asyncio.ensure_future(anext(stream, None))
        try:
            while not (await asyncio.wait({word}, timeout=self._silence_s))[0]:
                await self._live("generate")
            return word.result()
        finally:
            word.cancel()
            await asyncio.gather(word, return_exceptions=True)

    async def _call(self, method: str, *args: Any, timeout_s: float) -> Any:
        """A call that may be long: an engine that meanwhile shows no life is not waited for."""
        if self.worker is None:
            raise RuntimeError(f"engine {self.name} was never started")
        answer = asyncio.ensure_future(self.worker.call(method, *args, timeout_s=timeout_s))
        try:
            while not (await asyncio.wait({answer}, timeout=self._silence_s))[0]:
                await self._live(method)
            return answer.result()
        finally:
            answer.cancel()
            await asyncio.gather(answer, return_exceptions=True)

    async def _live(self, method: str) -> None:
        """Raise where the engine does not say that it is well."""
        try:
            health = await self.health(self._silence_s)
        except DeadlineExceeded:
            raise DeadlineExceeded(self.name, f"a sign of life during {method}", 2 * self._silence_s) from None
        if not health.ok:
            raise InfrastructureError(f"{self.name}: not well during {method}: {health.facts.get('failure', '')}")

    async def abort(self, ids: Sequence[str]) -> None:
        """End requests that nobody wants any more, or not here. NotImplementedError where the engine can't."""
        if self.worker is not None:
            await self._call("abort", list(ids), timeout_s=ABORT_S)

    async def pause(self) -> bool:
        """Sample nothing more. False where the engine can't hold requests: they must leave it."""
        self.paused = True
        self._changed()
        with suppress(NotImplementedError):
            await self._call("pause", timeout_s=PAUSE_S)
            return True
        return False

    async def resume(self) -> None:
        with suppress(NotImplementedError):  # then it was never told to pause
            await self._call("resume", timeout_s=PAUSE_S)
        self.paused = False
        self._changed()

    async def rest(self, asleep: frozenset[OffloadPart]) -> int:
        """Let exactly these parts of its memory sleep, where it has started; bytes really freed. What runs is paused."""
        if not self._up or self.worker is None:
            return 0
        freed = 0
        if to_sleep := sorted(asleep - self.asleep):
            with self._lane.span("overhead", f"putting {' and '.join(to_sleep)} to sleep"):
                freed = int(await self._call("sleep", to_sleep, timeout_s=REST_S))
        if to_wake := sorted(self.asleep - asleep):
            with self._lane.span("overhead", f"waking {' and '.join(to_wake)}"):
                await self._call("wake", to_wake, timeout_s=REST_S)
        self.asleep = asleep
        return freed

    def runs(self, busy: bool) -> None:
        """Whether it has requests now; said whenever some came, got tokens or left."""
        self._busy = busy
        self._stirred.set()
        self._changed()

    def _changed(self) -> None:
        self._lane.say("generating" if self._busy and not self.paused else "")

    async def stirred(self, wait_s: float) -> None:
        """Return when requests got tokens or left, or after `wait_s`."""
        self._stirred.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._stirred.wait()

    async def end(self) -> None:
        if self.worker is not None:
            await self.worker.kill()


def _unheard(step: int) -> None:
    """Nobody wants to know."""
