# SPDX-License-Identifier: Apache-2.0
"""The base of engines with an async interface and one `EngineThread` that owns the model. For engine authors.

The base class turns the calls of the engine contract into commands of the thread, and refuses invalid requests and
versions before anything runs. A subclass adds how its model is started, scored, loaded, proved and offloaded.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from relax_core.api.component import Chosen, Configurable, OptionsT
from relax_core.api.engine import Capabilities, Delta, Engine, EngineSpec, GenerateRequest, Health, switched_off
from relax_core.api.errors import InfrastructureError
from relax_core.api.weights import Manifest, Receipt, Resident, TensorInfo, WeightTransport, combined_fingerprint
from relax_core.engine_kit.engine_thread import DeltaStream, EngineThread
from relax_core.engine_kit.host_memory import trim
from relax_core.engine_kit.model_weights import StagedAdapter, check_manifest, received, stage_adapter

if TYPE_CHECKING:
    import numpy as np

ThreadT = TypeVar("ThreadT", bound=EngineThread)
Arriving = Iterator[tuple[TensorInfo, "np.ndarray"]]
_STOP_S = 30.0
"""Seconds to wait for the thread to end: longer than one iteration of a large model on a small machine."""


class ThreadedEngine(Engine[OptionsT], Generic[ThreadT, OptionsT]):
    """An engine with one model in this process, owned by one thread.

    A subclass's `start` sets `_spec`, `_vocab_size`, `_max_context`, `_known`, and `_thread` last.

    Invariants:
    - Versions only get newer. A version is loaded whole, or the engine fails: it never samples from a mix of two
      versions.
    - Updates, offloads and onloads run one at a time, so that a staged version still fits when it is loaded.
    """

    build: Callable[[Chosen], Configurable] | None = None
    """Function that builds a weight transport; the worker's host sets it before `start`."""
    scoring_samples: ClassVar[bool] = False
    """True if scoring a sequence also samples one token, for which the context needs room."""

    def __init__(self, options: OptionsT | None = None) -> None:
        super().__init__(options)
        self._thread: ThreadT | None = None
        self._transports: dict[str, WeightTransport] = {}
        self._spec = EngineSpec(model={}, max_context=0)
        self._vocab_size = self._max_context = 0
        self._known: Mapping[str, TensorInfo] = {}
        """Tensors that every version must have, by name."""
        self._dtype = ""
        """Additional number format in which full versions may arrive; empty: none."""
        self._base = ""
        """Fingerprint of the base model to which adapters are applied."""
        self._adapted: frozenset[str] = frozenset()
        """Weights with an adapter merged into them now."""
        self._changing = asyncio.Lock()

    # -- what an engine adds --------------------------------------------------------------------------------------

    @abstractmethod
    async def _score(
        self, thread: ThreadT, sequences: Sequence[Sequence[int]], temperature: float
    ) -> Sequence[Sequence[float]]:
        """Return the log-probs of checked sequences, in the form that `score` returns."""

    @abstractmethod
    def _load(self, thread: ThreadT, manifest: Manifest, staged: Arriving | StagedAdapter) -> None:
        """Replace weights; called on the engine's thread. If this raises, memory may hold a mix of two versions."""

    @abstractmethod
    def _prove(self, thread: ThreadT, manifest: Manifest) -> str:
        """Return a fingerprint of the weights in memory, empty if they cannot be read; called on the engine's thread."""

    @abstractmethod
    def _offload(self, thread: ThreadT, parts: frozenset[str]) -> int:
        """Free loaded parts, and return the bytes freed; called on the engine's thread."""

    @abstractmethod
    def _onload(self, thread: ThreadT, parts: frozenset[str]) -> None:
        """Restore offloaded parts; called on the engine's thread."""

    def _delta_base(self) -> Resident | None:
        """Return the source of the tensors to which deltas are applied; None: the engine takes no deltas."""
        return None

    def layout(self) -> str:
        """Return the name of the weights' memory layout; `_prove` fingerprints are comparable only within a layout."""
        return ""

    def _layout(self, payload: str) -> str:
        layout = self.layout()
        return f"{layout} with adapters" if layout and payload == "lora" else layout

    def offloadable(self) -> frozenset[str]:
        """Return the parts that can be offloaded on this machine."""
        return self.capabilities.offloads

    # -- requests -------------------------------------------------------------------------------------------------

    def generate(self, requests: Sequence[GenerateRequest]) -> AsyncIterator[Sequence[Delta]]:
        thread = self._running()
        check_requests(requests, self.capabilities, self._vocab_size, self._max_context, thread.version.step)
        return self._generate(thread, requests)

    async def _generate(self, thread: ThreadT, requests: Sequence[GenerateRequest]) -> AsyncIterator[Sequence[Delta]]:
        stream = DeltaStream(request.id for request in requests)
        try:
            await thread.ask(lambda: thread.submit(requests, stream))
            async for deltas in stream.items():
                yield deltas
        finally:
            if stream.unfinished:  # the caller stopped reading: free its requests
                with contextlib.suppress(InfrastructureError):
                    thread.call(lambda: thread.withdraw(stream))

    async def score(self, sequences: Sequence[Sequence[int]], temperature: float = 1.0) -> Sequence[Sequence[float]]:
        thread = self._running()
        if temperature <= 0:
            raise ValueError(f"temperature {temperature}: log-probs are of logits / temperature; give a number above 0")
        more = " plus one sampled token" if self.scoring_samples else ""
        for number, sequence in enumerate(sequences):
            fault = check_ids(sequence, self._vocab_size)
            if fault or len(sequence) + bool(more) > self._max_context:
                long = f"{len(sequence)} tokens{more} exceed the context of {self._max_context} tokens"
                raise ValueError(f"sequence {number}: {fault or long}")
        return await self._score(thread, sequences, temperature)

    async def pause(self) -> None:
        await self._set_paused(True)

    async def resume(self) -> None:
        await self._set_paused(False)

    async def _set_paused(self, paused: bool) -> None:
        thread = self._running()
        await thread.ask(lambda: setattr(thread, "paused", paused))

    async def profile(self, path: str, max_bytes: int) -> None:
        thread = self._running()
        await thread.ask(lambda: thread.begin_profile(path, max_bytes))

    async def abort(self, ids: Sequence[str]) -> None:
        thread, wanted = self._running(), frozenset(ids)
        await thread.ask(lambda: thread.abort(wanted))

    # -- weights --------------------------------------------------------------------------------------------------

    async def update_weights(self, manifest: Manifest, transport: Chosen) -> Receipt:
        began, thread = time.monotonic(), self._running()
        async with self._changing:
            self._refuse(manifest, thread)
            receiver = self._transport(transport)
            staged: Arriving | StagedAdapter
            if manifest.payload == "lora":
                lora = self._spec.model["lora"]
                staged = await asyncio.to_thread(stage_adapter, manifest, receiver, self._known, lora, self._adapted)
                arrived, adapted = staged.arrived, frozenset(staged.pairs)
            else:
                arrived, adapted = [], frozenset()
                arriving = await asyncio.to_thread(_staged, manifest, receiver, self._delta_base())
                staged = _noted(arriving, arrived)
            times = {"wire": time.monotonic() - began}
            resident = await thread.ask(lambda: self._replace(thread, manifest, staged, arrived, times), "weights")
            self._adapted = adapted
        return Receipt(
            self._spec.name, manifest.version, self.capabilities.receipts, combined_fingerprint(arrived),
            time.monotonic() - began, resident=resident, times=times,
            layout=self._layout(manifest.payload),
        )  # fmt: skip

    def _refuse(self, manifest: Manifest, thread: ThreadT) -> None:
        """Raise ValueError if the version cannot be loaded on top of the weights in memory."""
        version, have = manifest.version, thread.version
        if "weights" in thread.offloaded:
            raise ValueError(f"{version}: {self._spec.name}'s weights are offloaded; onload them first")
        if not version.supersedes(have):
            raise ValueError(f"{version}: this engine has {have}; it loads only newer versions of that model")
        if manifest.payload == "lora":
            if not (self.capabilities.lora and self._spec.model.get("lora")):
                raise ValueError(f"{version}: got an adapter, but model.lora is not set for this engine")
            if manifest.base != self._base:
                raise ValueError(f"{version}: got an adapter on top of {manifest.base}; this engine has {self._base}")
            return
        if manifest.payload == "delta":
            if not self._takes_deltas():
                switch = switched_off(type(self), "delta", dict(self.options))  # type: ignore[call-overload]
                fix = f"set engine.{switch} = true" if switch else "publish full versions"
                raise ValueError(f"{version}: got a delta, but this engine keeps no weights to apply it to; {fix}")
            if manifest.base != str(have):
                raise ValueError(f"{version}: got a delta on top of {manifest.base}; this engine has {have}")
            if self._adapted:
                raise ValueError(f"{version}: got a delta, but its base contains an adapter; publish a full version")
        check_manifest(manifest, self._known, self._dtype)

    def _takes_deltas(self) -> bool:
        options: dict[str, Any] = dict(self.options)  # type: ignore[call-overload]
        return self.capabilities.delta and not switched_off(type(self), "delta", options)

    def _transport(self, chosen: Chosen) -> WeightTransport:
        if chosen.name.rpartition(":")[2] not in self.capabilities.transports:
            raise ValueError(f"transport {chosen.name!r}: this engine supports {sorted(self.capabilities.transports)}")
        if self.build is None:
            raise RuntimeError(f"{type(self).__name__}.build is not set; the worker's host must set it before start")
        key = f"{chosen.name} {sorted(chosen.options.items())}"
        if key not in self._transports:  # keep it: it may have mapped the memory that the next version is written to
            built = self.build(chosen)
            if not isinstance(built, WeightTransport):
                raise TypeError(f"transport {chosen.name!r} built a {type(built).__name__}, not a WeightTransport")
            self._transports[key] = built
        return self._transports[key]

    def _replace(
        self, thread: ThreadT, manifest: Manifest, staged: Arriving | StagedAdapter, arrived: Sequence[TensorInfo],
        times: dict[str, float],
    ) -> str:  # fmt: skip
        """Load a staged version and return its fingerprint in memory; called on the engine's thread.

        Tokens sampled so far are sent as tokens of the old version; the next token is of the new version.
        """
        thread.flush()
        thread.end_profile()
        began = time.monotonic()
        try:
            self._load(thread, manifest, staged)
            if missing := {info.name for info in manifest.sent} - {info.name for info in arrived}:
                raise InfrastructureError(f"{manifest.version}: {sorted(missing)[:8]} did not arrive; publish again")
            loaded = time.monotonic()
            resident = self._prove(thread, manifest)
            thread.renew(manifest.version)
        except Exception as error:
            # Memory may hold a mix of two versions now, which must never be sampled from.
            thread.fail(f"{type(error).__name__}: {error}")
            raise
        times.update(load=loaded - began, proof=time.monotonic() - loaded)
        return resident

    # -- memory and life ------------------------------------------------------------------------------------------

    async def offload(self, parts: Sequence[str]) -> int:
        thread, wanted = self._running(), self._parts(parts)

        def take_out() -> int:
            leaving = wanted - thread.offloaded
            thread.offloaded |= wanted
            freed = self._offload(thread, leaving) if leaving else 0
            trim()  # malloc keeps the memory of a step's caches
            return freed

        async with self._changing:
            return await thread.ask(take_out)

    async def onload(self, parts: Sequence[str]) -> None:
        thread, wanted = self._running(), self._parts(parts)

        def bring_back() -> None:
            if returning := wanted & thread.offloaded:
                self._onload(thread, returning)
            thread.offloaded -= wanted

        async with self._changing:
            await thread.ask(bring_back)

    def _parts(self, parts: Sequence[str]) -> frozenset[str]:
        if unknown := sorted(set(parts) - self.offloadable()):
            has = ", ".join(sorted(self.offloadable())) or "nothing (offloading may need a GPU)"
            raise ValueError(f"parts: got {', '.join(unknown)}; this engine can offload {has}")
        return frozenset(parts)

    async def health(self) -> Health:
        thread = self._thread
        if thread is None:
            return Health(False, self._spec.version, facts={"failure": "not started"})
        offloaded = tuple(sorted(thread.offloaded))
        facts = {"failure": thread.failure, "paused": thread.paused, "offloaded": offloaded}
        return Health(not thread.failure, thread.version, thread.running, thread.waiting, facts)

    async def stop(self) -> None:
        thread = self._thread
        if thread is None:
            return
        # The call raises if the thread has already ended.
        with contextlib.suppress(InfrastructureError):
            thread.call(thread.stop)
        if not await asyncio.to_thread(thread.join, _STOP_S):
            raise InfrastructureError(f"{self._spec.name}: an iteration takes over {_STOP_S:.0f} s; kill the process")

    def _running(self) -> ThreadT:
        if self._thread is None:
            raise InfrastructureError(f"{self._spec.name}: not started; call start first")
        return self._thread


def _staged(manifest: Manifest, transport: WeightTransport, resident: Resident | None) -> Arriving:
    """Return the arriving tensors, checked as far as possible before any weight changes.

    A stored full version is checked whole, as views of its files. A stored delta is checked whole here and received
    again for loading. Of a live version only the first tensor is received here, so that memory never holds a second
    model.
    """
    arriving = received(transport, manifest, resident)
    if manifest.payload == "full" and not transport.live:
        return iter(list(arriving))
    if not transport.live:
        for _ in arriving:  # raises for a damaged delta before any weight changes
            pass
        return received(transport, manifest, resident)
    first = next(arriving, None)
    return iter(()) if first is None else chain([first], arriving)


def _noted(arriving: Arriving, arrived: list[TensorInfo]) -> Arriving:
    for info, array in arriving:
        arrived.append(info)
        yield info, array


# -- requests that an engine can take -----------------------------------------------------------------------------


def check_requests(
    requests: Sequence[GenerateRequest], can: Capabilities, vocab_size: int, max_context: int, step: int
) -> None:
    """Raise ValueError for the first invalid request; the text names request, field, value and limit."""
    seen: set[str] = set()
    for request in requests:
        if request.id in seen:
            raise ValueError(f"request {request.id!r} appears twice in one call; ids must be unique")
        seen.add(request.id)
        if fault := _fault(request, can, vocab_size, max_context, step):
            raise ValueError(f"request {request.id!r}: {fault}")


def check_ids(tokens: Sequence[int], vocab_size: int) -> str:
    """Return why token ids are invalid; empty: valid."""
    if len(tokens) and not (min(tokens) >= 0 and max(tokens) < vocab_size):
        bad = next(token for token in tokens if not 0 <= token < vocab_size)
        return f"token {bad} is outside the vocabulary of {vocab_size} tokens"
    return ""


def _fault(request: GenerateRequest, can: Capabilities, vocab_size: int, max_context: int, step: int) -> str:
    """Return why a request is invalid; empty: valid."""
    if not request.tokens:
        return "no prompt tokens; give at least one"
    if request.max_new_tokens < 1:
        return f"max_new_tokens is {request.max_new_tokens}; ask for at least 1"
    if len(request.tokens) + request.max_new_tokens > max_context:
        return f"{len(request.tokens)} prompt + {request.max_new_tokens} new tokens exceed the context of {max_context}"
    if request.floor > step:
        return (
            f"floor is step {request.floor}, but the weights are of step {step}; route it to an engine with newer ones"
        )
    if fault := check_ids((*request.tokens, *request.stop_tokens, *request.suppress_tokens), vocab_size):
        return fault
    if not 0 <= request.temperature < float("inf"):
        return f"temperature is {request.temperature}; give 0 (greedy) or more"
    if not 0 < request.top_p <= 1:
        return f"top_p is {request.top_p}; give a number in (0, 1]"
    if not 0 <= request.top_k <= vocab_size or not 0 <= request.num_top <= vocab_size:
        return f"top_k is {request.top_k}, num_top {request.num_top}; give 0 to {vocab_size}"
    if len(set(request.suppress_tokens)) >= vocab_size:
        return "suppress_tokens covers the whole vocabulary; leave at least one token to sample"
    if request.media and not can.media:
        return "got media, but this engine takes text only"
    if request.routed_experts and not can.routed_experts:
        return "routed_experts is true, but this engine does not record experts"
    return ""
