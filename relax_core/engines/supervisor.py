# SPDX-License-Identifier: Apache-2.0
"""The supervisor of a pool's engines: it starts, pauses, offloads, updates and replaces them.

The supervisor calls the engines and reports the results to the router, which decides where requests run.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from relax_core.api.component import Chosen
from relax_core.api.errors import DeadlineExceeded, InfrastructureError, RelaxError, WorkerDied
from relax_core.api.plan import OffloadPart
from relax_core.api.role import Clock, WeightService
from relax_core.api.weights import Canary, Manifest, Receipt, ReceiptLevel, Version
from relax_core.engines.engine_state import EngineStatus
from relax_core.engines.router import Action, Router
from relax_core.engines.scaling import JoiningStep
from relax_core.engines.slot import EngineSlot
from relax_core.rpc.waiting import start_all

T = TypeVar("T")
PREEMPT_RETRY_S = 0.2
"""Seconds between two attempts to abort the requests of an engine."""
RETRY_S = 5.0
"""Seconds between two requests to transfer a live version again, while no route leads to this version."""
HEALTH_S = 30.0
LEVELS: tuple[ReceiptLevel, ...] = ("wire", "resident", "behaviour")
MODEL_FACTS = {"fingerprint": "give all machines the same, unchanged model folder",
               "vocab_size": "give all engines the same model folder"}  # fmt: skip
"""Facts that must be equal in all engines of a pool, with the fix for the error."""
OnArrival = Callable[[Receipt | None], Awaitable[None]]
"""Called with the receipt of an engine that now serves a version; None if the engine had this version already."""
Report = Callable[[str, str, float], Awaitable[None]]
"""Called with (event, detail, amount): `failed` (0), `retried` (number of requests) or `recovered` (seconds)."""
Perform = Callable[[Sequence[Action]], None]


class OffloadState:
    """The parts of the engines' memory that are offloaded, and the tasks that need weights on the devices.

    `loaded -> offloading (waits for the tasks) -> offloaded -> loading -> loaded`. This class calls no engine.

    Invariants:
    - Engine starts and weight updates run within `weights_in_use`: they wait while weights are offloaded, and weights
      are not offloaded while such a task runs.
    - A task within `weights_in_use` may enter again without waiting.
    - If weights are not among the supported parts, no task waits.
    """

    def __init__(self, supported: Iterable[OffloadPart] = ()) -> None:
        self.supported: frozenset[OffloadPart] = frozenset(supported)
        self.offloaded: frozenset[OffloadPart] = frozenset()
        """Parts that every engine should have offloaded."""
        self.num_waiting = 0
        """Tasks that wait for weights to be loaded."""
        self._closed = False
        self._users: Counter[asyncio.Task[Any] | None] = Counter()
        self._changed = asyncio.Condition()

    @contextlib.asynccontextmanager
    async def weights_in_use(self) -> AsyncIterator[None]:
        user = asyncio.current_task()
        self.num_waiting += 1
        try:
            async with self._changed:
                await self._changed.wait_for(lambda: self._users[user] > 0 or not self._closed)
                self._users[user] += 1
        finally:
            self.num_waiting -= 1
        try:
            yield
        finally:
            self._users[user] -= 1
            self._users += Counter()  # drops those at zero
            async with self._changed:
                self._changed.notify_all()

    async def offload(self, parts: Iterable[OffloadPart]) -> None:
        """Plan to offload the supported parts among `parts`; return when no task uses the weights any more."""
        planned = self.supported.intersection(parts)
        self._closed = self._closed or "weights" in planned
        async with self._changed:
            await self._changed.wait_for(lambda: not (self._closed and self._users.total()))
        self.offloaded |= planned

    @contextlib.asynccontextmanager
    async def loading(self, parts: Iterable[OffloadPart]) -> AsyncIterator[None]:
        """Plan to load `parts`; the body loads them on every engine, then tasks that wait for the weights continue."""
        self.offloaded -= self.supported.intersection(parts)
        yield
        self._closed = "weights" in self.offloaded
        async with self._changed:
            self._changed.notify_all()


class EngineSupervisor:
    """The supervisor of one pool's engines, which applies pauses, offloads, weight updates and replacements.

    An engine: `starting -> serving -> (failed -> replaced -> newest weights proved -> serving)`; until the first
    weights of a resumed run it is `waiting`.

    Invariants:
    - An engine starts to serve only through `_admit`, after it has proved the newest weights; this holds for
      replacements and joining engines too.
    - An engine loads one version at a time (`update_lock`). It runs one pause, resume or offload at a time
      (`pause_lock`).
    - An engine runs nothing while it loads weights of another incarnation (`_before_loading`). Its requests continue
      elsewhere; attempts with tokens that a rollback discarded were already ended by the bus and cancelled by the
      rollout.
    - `containing` passes an engine's failure to the router, once per failure, and not to the caller.
    - Every change after which requests may be dispatched ends with a call of `perform`.
    """

    def __init__(
        self, slots: Mapping[str, EngineSlot], router: Router, offload_parts: Sequence[OffloadPart], clock: Clock,
        updates: WeightUpdater | None, report: Report, perform: Perform, serve_at_start: bool,
    ) -> None:  # fmt: skip
        self._slots, self._router, self._offload, self._clock = slots, router, OffloadState(offload_parts), clock
        self._updates, self._report, self._perform = updates, report, perform
        self._serve_at_start = serve_at_start
        self.on_change: Callable[[], None] = lambda: None
        """Called when requests arrive or end, and when an engine is about to start or load weights. The rollout role sets
        it if the pool shares devices."""
        self._facts: Mapping[str, Any] = {}
        self._newest: tuple[Manifest, Chosen] | None = None
        self._published = asyncio.Event()
        """Set once a version was published."""

    async def start(self) -> Mapping[str, Any]:
        """Start all engines, check that all hold the same model, and return the facts of the first engine."""
        found = await start_all(*(slot.start() for slot in self._slots.values()))
        self._facts = found[0]
        for slot, facts in zip(self._slots.values(), found, strict=True):
            self._check_model(facts)
            self._router.set_kv_tokens(slot.name, int(facts.get("kv_tokens", 0)))
        self._router.vocab_size = int(self._facts.get("vocab_size", 0))
        self._router.max_context = int(self._facts.get("max_context", 0))
        for slot in self._slots.values():
            slot.on_loading = self._before_loading
            self._admit(slot, slot.state.failures)
        return self._facts

    def _check_model(self, facts: Mapping[str, Any]) -> None:
        """Raise InfrastructureError unless an engine has the model of its pool, and a context that is long enough."""
        longest = self._router.max_context
        if (context := facts.get("max_context", longest)) < longest:
            fix = "give all engines the same context length"
            raise InfrastructureError(
                f"an engine has a max_context of {context}, the first of its pool {longest}; {fix}"
            )
        for what, fix in MODEL_FACTS.items():
            if (have := facts.get(what)) != (want := self._facts.get(what)):
                raise InfrastructureError(f"an engine has the {what} {have}, the first of its pool {want}; {fix}")

    def _admit(self, slot: EngineSlot, failures: int) -> bool:
        """Let an engine with the newest weights serve.

        Return False if the engine failed meanwhile, or if it has only the model folder's weights, which a resumed run
        does not serve.
        """
        if self._newest is None and not self._serve_at_start:
            slot.state.status, slot.state.version = EngineStatus.WAITING, slot.state.loaded
            return False
        self._accept_held(slot)
        admitted = self._router.on_proved(slot.name, failures, slot.state.loaded, self._clock.now())
        self._perform(())
        return admitted

    def _accept_held(self, slot: EngineSlot) -> None:
        """Accept the tokens that waited for the proof of the weights that an engine has now."""
        self._perform(self._router.on_loaded(slot.name, slot.state.loaded, self._clock.now()))
        slot.set_busy(bool(slot.state.running))

    def _not_out(self) -> list[EngineSlot]:
        """Return the engines that are neither being replaced nor joining."""
        out = (EngineStatus.OUT, EngineStatus.JOINING)
        return [slot for slot in self._slots.values() if slot.state.status not in out]

    # -- pauses -------------------------------------------------------------------------------------------------

    async def pause(self) -> None:
        """Pause all engines; return when no engine samples. Requests keep their tokens; new requests wait.

        Calling this again has no effect.
        """
        self._router.pause(self._clock.now())
        await self._follow_pauses()

    async def resume(self) -> None:
        """Resume sampling; dispatch requests that arrived during the pause."""
        self._router.resume(self._clock.now())
        self._perform(())
        await self._follow_pauses()

    async def _follow_pauses(self) -> None:
        await asyncio.gather(*(self._contained(slot, self._follow_pause(slot)) for slot in self._not_out()))

    async def _follow_pause(self, slot: EngineSlot) -> None:
        async with slot.pause_lock:
            while slot.state.paused != self._router.paused:
                if slot.state.paused:
                    await slot.resume()
                    self._router.release(slot.name, "paused", self._clock.now())
                    self._perform(())
                else:
                    self._router.hold(slot.name, "paused")
                    if self._router.whole_batches:  # requests kept over an offload would continue without their caches
                        await self._preempt(slot)
                    if not await slot.pause():
                        await self._preempt(slot)

    async def _preempt(self, slot: EngineSlot) -> None:
        """Take back an engine's requests with their tokens; return when the engine runs nothing.

        In a deterministic pool, or on an engine that cannot abort, the requests run to completion instead. The abort is
        repeated, since a request may still be on its way to the engine when an abort arrives.
        """
        while slot.state.running:
            if ids := self._router.preempt(slot.name):
                with contextlib.suppress(NotImplementedError):  # then the requests run to completion
                    await slot.abort(ids)
            await slot.wait_progress(PREEMPT_RETRY_S)

    # -- devices ------------------------------------------------------------------------------------------------

    async def offload(self, parts: Sequence[OffloadPart]) -> int:
        """Free the engines' memory and return the bytes freed. The pool must be paused."""
        await self._offload.offload(parts)
        freed = await self._follow_offload()
        return sum(count or 0 for count in freed)

    async def onload(self, parts: Sequence[OffloadPart]) -> None:
        async with self._offload.loading(parts):
            await self._follow_offload()

    async def _follow_offload(self) -> Sequence[int | None]:
        return await asyncio.gather(
            *(self._contained(slot, self._offload_as_planned(slot)) for slot in self._slots.values())
        )

    async def _offload_as_planned(self, slot: EngineSlot) -> int:
        async with slot.pause_lock:
            return await slot.offload(self._offload.offloaded)

    def work(self) -> int:
        """Return the number of open requests, and of engines that wait for devices to start or load weights."""
        return self._router.num_open + self._offload.num_waiting

    # -- weights ------------------------------------------------------------------------------------------------

    @property
    def serving(self) -> bool:
        return any(engine.status is EngineStatus.SERVING for engine in self._router.engines.values())

    def newest(self) -> Version:
        """Return the version at which groups are admitted (`Router.newest`)."""
        return self._router.newest()

    async def update(
        self, manifest: Manifest, transport: Chosen, on_arrival: OnArrival | None = None
    ) -> tuple[str, ...]:
        """Load a version on every engine; return the names of the engines that proved it.

        An engine that fails or is too slow is replaced. `on_arrival` is called for each engine as soon as it serves the
        version, without waiting for the rest.
        """
        self._newest = (manifest, transport)
        self._published.set()
        self._router.on_published(manifest.version)

        async def follow(slot: EngineSlot) -> str:
            failures = slot.state.failures
            if self._router.abandoned(slot.name):  # stop sampling now: the load may have to wait
                await self._contained(slot, self._preempt(slot))
            if slot.state.failures != failures:  # the engine failed and is being replaced
                return ""
            receipt = await self._contained(slot, self._load_newest(slot, failures))
            if not self._admit(slot, failures):
                return ""
            if on_arrival is not None:
                await on_arrival(receipt)
            return slot.name

        staying = [slot for slot in self._not_out() if slot.state.status is not EngineStatus.LEAVING]
        names = await asyncio.gather(*map(follow, staying))
        return tuple(name for name in names if name)

    async def _load_newest(self, slot: EngineSlot, failures: int | None = None) -> Receipt | None:
        """Load versions until the engine has the newest; return the last receipt, None if there was nothing to load.

        If `failures` is given and the engine has failed more often, load nothing: `replace` loads the newest version.
        """
        receipt = None
        async with slot.update_lock:
            if failures not in (None, slot.state.failures):
                return None
            while (
                self._updates is not None
                and self._newest is not None
                and slot.state.loaded[1:] < self._newest[0].version[1:]
            ):
                self.on_change()
                async with self._offload.weights_in_use(), self._drained(slot):
                    receipt = await self._updates.update(slot, *self._newest)
        return receipt

    async def _before_loading(self, slot: EngineSlot, version: Version) -> None:
        """Preempt an engine's requests before it loads another incarnation's weights: their steps can't be compared."""
        self._accept_held(slot)  # a request may have ended under the weights that were proved last
        if version.incarnation != slot.state.version.incarnation:
            self._router.on_published(version)
            await self._preempt(slot)
        self._router.on_loading(slot.name, version)

    @contextlib.asynccontextmanager
    async def _drained(self, slot: EngineSlot) -> AsyncIterator[None]:
        """Run nothing on an engine during the body, unless the engine supports in-flight updates.

        The engine's requests continue on another engine, or on this engine after the body.
        """
        if slot.capabilities.in_flight_updates:
            yield
            return
        self._router.hold(slot.name, "updating")
        try:
            await self._preempt(slot)
            yield
        finally:
            self._router.release(slot.name, "updating", self._clock.now())
            self._perform(())

    # -- failures -----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def containing(self, slot: EngineSlot) -> Iterator[None]:
        """Report an engine's failure in the body to the router, which ignores a failure that it already counts."""
        failures = slot.state.failures
        try:
            yield
        except RelaxError as error:
            why = str(error) if slot.name in str(error) else f"{slot.name}: {error}"
            self._perform(self._router.on_failure(slot.name, failures, why))

    async def _contained(self, slot: EngineSlot, work: Coroutine[Any, Any, T]) -> T | None:
        """Await work on an engine; return None if the engine failed."""
        result = None
        with self.containing(slot):
            result = await work
        return result  # noqa: RET504 -- `containing` suppresses a failure, which leaves the result None

    async def replace(self, slot: EngineSlot, why: str, requests: int = 0) -> None:
        """Stop a failed engine, start a new one, bring it to the newest weights and pause state, and let it serve.

        `requests`: number of the failed engine's open requests, which are retried elsewhere.
        """
        since, failures = self._clock.now(), slot.state.failures
        slot.set_busy(False)
        try:
            if self._updates is not None:
                await self._updates.forget(slot)
            await self._report("failed", why, 0.0)
            if requests:
                await self._report("retried", why, requests)
            await slot.stop()
            self.on_change()
            async with self._offload.weights_in_use():
                self._check_model(facts := await slot.start())
                self._router.set_kv_tokens(slot.name, int(facts.get("kv_tokens", 0)))
                await self._offload_as_planned(slot)
            await self._catch_up(slot)
        except InfrastructureError as error:
            self._perform(self._router.on_restart_failed(slot.name, str(error)))
            return
        self._admit(slot, failures)
        slot.restarts += 1
        await self._report("recovered", slot.name, self._clock.now() - since)

    async def _catch_up(self, slot: EngineSlot) -> None:
        """Bring a newly started engine to the newest weights and the pool's pause state."""
        await self._load_newest(slot)
        while slot.state.paused != self._router.paused:
            await self._follow_pause(slot)
            await self._load_newest(slot)

    # -- joins and leaves ---------------------------------------------------------------------------------------

    async def join(self, slot: EngineSlot, on_step: Callable[[JoiningStep], None]) -> None:
        """Start an engine that the router knows as joining; return when it serves.

        Raises if the engine can't start, is not healthy, has another model than the pool, or can't prove its weights. It
        has served nothing then. The fingerprint of the model folder proves the weights of a pool that gets no updates;
        the newest version must be proved in a pool that does. In a resumed run, wait for the first weights; an engine
        that was started elsewhere always does, since the weights of its own model folder are not proved.
        """
        on_step("creating")
        self.on_change()
        slot.on_loading = self._before_loading
        async with self._offload.weights_in_use():
            facts = await slot.start()
            on_step("health_checking")
            health = await slot.health(HEALTH_S)
            if not health.ok:
                raise InfrastructureError(f"{slot.name}: unhealthy after its start: {health.facts.get('failure', '')}")
            self._check_model(facts)
            if self._updates is None and not facts.get("fingerprint"):
                fix = "return the fact `fingerprint` from Engine.start()"
                raise InfrastructureError(f"{slot.name}: nothing proves that it has the model of its pool; {fix}")
            self._router.set_kv_tokens(slot.name, int(facts.get("kv_tokens", 0)))
            await self._offload_as_planned(slot)
        on_step("weight_syncing")
        if slot.address or not self._serve_at_start:
            await self._published.wait()
        await self._catch_up(slot)
        self._admit(slot, slot.state.failures)

    async def lose(self, slot: EngineSlot, why: str, requests: int) -> None:
        """Report the loss of an engine that is not replaced; `requests` of its open requests continue elsewhere."""
        slot.set_busy(False)
        await self._report("failed", why, 0.0)
        if requests:
            await self._report("retried", why, requests)

    async def drain(self, slot: EngineSlot) -> None:
        """Take back the requests of an engine that leaves; return when it runs nothing."""
        await self._contained(slot, self._preempt(slot))

    async def forget(self, slot: EngineSlot) -> None:
        """Withdraw the receipts of an engine that has left."""
        if self._updates is not None:
            await self._updates.forget(slot)


class WeightUpdater:
    """The updater of engines to the newest weights.

    For each version: `route -> load -> prove -> receipt -> slot.state.loaded`.

    Invariants:
    - `slot.state.loaded` changes only after every proof that the run requires was accepted. A proof counts only for the
      worker that gave it, not for its replacement.
    - A failed update raises an `InfrastructureError` that names the engine, within the deadline.
    """

    def __init__(self, weights: WeightService, clock: Clock, proof: str, tolerance: float, timeout_s: float) -> None:
        self._weights, self._clock = weights, clock
        self._proof, self._tolerance, self._timeout_s = proof, tolerance, timeout_s

    async def update(self, slot: EngineSlot, manifest: Manifest, transport: Chosen) -> Receipt:
        """Load this version or a later one along the route of the weight service; return the last receipt.

        If the trainer does not send a live version now, request the version (`want`) until the trainer sends it again.
        """
        target, model, starts = manifest.version, manifest.version.model, slot.starts
        deadline = self._clock.now() + self._timeout_s
        while True:
            if starts != slot.starts:
                raise InfrastructureError(f"{slot.name}: the engine ended before it loaded {target}")
            left = self._time_left(slot, model, deadline)
            route = await self._weights.route(model, slot.state.loaded, 0.0, None, slot.name, left)
            if not route:
                await self._weights.want(slot.name, model)
                route = await self._weights.route(model, slot.state.loaded, min(left, RETRY_S), None, slot.name, left)
            for link, chosen in route:
                receipt = await self._load(slot, link, chosen, deadline)
                if receipt is None:
                    break
                if receipt.version[1:] >= target[1:]:
                    return receipt

    async def forget(self, slot: EngineSlot) -> None:
        """Withdraw the receipts of an engine that failed, since its weights are lost."""
        await self._weights.forget(slot.name, slot.state.loaded.model)

    async def _load(self, slot: EngineSlot, manifest: Manifest, transport: Chosen, deadline: float) -> Receipt | None:
        """Load and prove one version; return None if the caller should ask for another route.

        Return None if the engine missed a live version and kept its old version, or if a rollback abandoned the version
        while the engine loaded it.
        """
        version, starts = manifest.version, slot.starts
        left = self._time_left(slot, str(version), deadline)
        try:
            receipt = await slot.update(manifest, transport, left)
        except (ValueError, InfrastructureError) as error:
            if manifest.live and not isinstance(error, (WorkerDied, DeadlineExceeded)):
                health = await slot.health(HEALTH_S)
                if health.ok and health.version == slot.state.loaded:
                    return None
            raise InfrastructureError(f"{slot.name}: {version} was not loaded: {error}") from error
        wanted = slot.capabilities.receipts if self._proof == "auto" else self._proof
        if wanted == "behaviour":
            receipt = await self._check_canary(slot, manifest, receipt, deadline)
        if (receipt.receiver, receipt.version) != (slot.name, version):
            raise InfrastructureError(
                f"{slot.name}: got a receipt of {receipt.receiver} for {receipt.version}, want {version}"
            )
        if LEVELS.index(receipt.level) < LEVELS.index(wanted):
            raise InfrastructureError(f"{slot.name}: {version} proved at level {receipt.level}, want {wanted}")
        counts = slot.starts == starts and await self._weights.receipt(receipt)
        if slot.starts != starts:
            await self.forget(slot)
            raise InfrastructureError(f"{slot.name}: the engine was replaced while it loaded {version}")
        slot.state.loaded = version
        return receipt if counts else None

    async def _check_canary(self, slot: EngineSlot, manifest: Manifest, receipt: Receipt, deadline: float) -> Receipt:
        """Compare the engine's log-probs of the canary with the trainer's; return the receipt at level `behaviour`.

        Raises InfrastructureError if the manifest has no canary or a log-prob differs by more than the tolerance.
        """
        canary, began = manifest.canary, self._clock.now()
        if canary is None:
            raise InfrastructureError(f"{manifest.version}: published without a canary; choose another weights.proof")
        left = self._time_left(slot, f"the canary of {manifest.version}", deadline)
        (log_probs,) = await slot.score([canary.tokens], canary.temperature, left)
        worst = difference(canary, log_probs)
        if not worst <= self._tolerance:
            raise InfrastructureError(
                f"{slot.name}: {manifest.version}: a canary's log-prob differs from the trainer's by {worst:.4g}; "
                f"weights.tolerance allows {self._tolerance:g}"
            )
        seconds = self._clock.now() - began
        times = {**receipt.times, "proof": receipt.times.get("proof", 0.0) + seconds}
        return replace(receipt, level="behaviour", times=times, seconds=receipt.seconds + seconds)

    def _time_left(self, slot: EngineSlot, what: str, deadline: float) -> float:
        left = deadline - self._clock.now()
        if left <= 0:
            raise DeadlineExceeded(slot.name, f"weights: {what}", self._timeout_s)
        return left


def difference(canary: Canary, log_probs: Sequence[float]) -> float:
    """Return the largest difference from the canary's log-probs, without the first; infinite if NaN or incomplete."""
    if len(log_probs) != len(canary.log_probs):
        return float("inf")
    found = [abs(a - b) for a, b in zip(canary.log_probs[1:], log_probs[1:], strict=True)]
    return max((float("inf") if value != value else value for value in found), default=0.0)
