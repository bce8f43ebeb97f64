# SPDX-License-Identifier: Apache-2.0
"""The engine around a `Stepper`: async outside, one driving thread inside. For those who write engines.

It translates between the engine contract and `StepperThread`, refuses what the model is not, and tells what it can prove:
the bytes that arrived, and where the stepper can read its memory a checksum of that. Extend it by `prepare` and `make`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from itertools import chain
from math import prod
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from relax_core.api.component import Configurable, OptionsT
from relax_core.api.engine import Delta, Engine, EngineSpec, GenerateRequest, Health, switched_off
from relax_core.api.errors import InfrastructureError
from relax_core.api.trainer import Chosen
from relax_core.api.weights import Manifest, Receipt, Resident, TensorInfo, WeightTransport, combined_fingerprint
from relax_core.engine_kit.engine_thread import DeltaStream
from relax_core.engine_kit.merged_adapters import MergedAdapters, folder_in_dtype
from relax_core.engine_kit.model_folder import check_manifest, folder_tensors
from relax_core.engine_kit.requests import check_ids, check_requests
from relax_core.engine_kit.stepper import SteppedRequest, Stepper, StepperThread
from relax_core.tensor_files.delta import DeltaBase

if TYPE_CHECKING:
    import numpy as np

T = TypeVar("T")
Arriving = Iterator[tuple[TensorInfo, "np.ndarray"]]
Arrays = Iterator[tuple[str, "np.ndarray", str]]
_STOP_S = 30.0
"""One step of a large model on a small machine ends within this."""
_SAFETENSORS = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "float64": "F64"}


class SteppedEngine(Engine[OptionsT], Generic[OptionsT]):
    """One stepper in this process."""

    build: Callable[[Chosen], Configurable] | None = None
    """Makes a weight transport; set by the worker's host before `start`."""

    def __init__(self, options: OptionsT | None = None) -> None:
        super().__init__(options)
        self._thread: StepperThread | None = None
        self._transports: dict[str, WeightTransport] = {}
        self._spec = EngineSpec(model={}, max_context=0)
        self._known: dict[str, TensorInfo] = {}
        self._vocab_size = self._max_context = 0
        self._dtype = ""
        self._adapters: MergedAdapters | None = None
        self._kept: DeltaBase | None = None
        # One update or sleep at a time: what is staged must still fit when it is loaded.
        self._changing = asyncio.Lock()

    @abstractmethod
    def prepare(self) -> Mapping[str, Any]:
        """Before anything heavy is imported, in the engine's process; facts of its own. ConfigError where it can't run."""

    @abstractmethod
    def make(self, spec: EngineSpec) -> Stepper:
        """The library with the model loaded; called on the thread that steps it."""

    def layout(self) -> str:
        """How weights lie in its memory; checksums are compared within one layout."""
        return ""

    def sleeps(self) -> frozenset[str]:
        """Parts that can sleep on this machine."""
        return self.capabilities.sleep

    async def start(self, spec: EngineSpec) -> Mapping[str, Any]:
        began = time.monotonic()
        facts = self.prepare()
        self._spec = spec
        self._known = await asyncio.to_thread(folder_tensors, str(spec.model["path"]))
        name = f"relax-{type(self).__name__.removesuffix('Engine').lower()}"
        self._thread = StepperThread(lambda: self.make(spec), spec.version, spec.kv_across_versions, name)
        model = await asyncio.wrap_future(self._thread.begin())
        self._vocab_size, self._max_context = model.vocab_size, model.max_context
        self._dtype = _SAFETENSORS.get(model.dtype, model.dtype)
        lora = spec.model.get("lora") if self.capabilities.lora else None
        if lora is not None:
            folder, known, dtype = str(spec.model["path"]), self._known, self._dtype
            self._adapters = await asyncio.to_thread(lambda: MergedAdapters(folder, known, lora, dtype))
        if self._takes_deltas():
            path, dtype = str(spec.model["path"]), self._dtype
            held = await asyncio.to_thread(lambda: {name: array for name, array, _ in folder_in_dtype(path, dtype)})
            self._kept = DeltaBase(spec.version, lambda: held)
        return {
            "vocab_size": model.vocab_size,
            "max_context": model.max_context,
            "fingerprint": combined_fingerprint(self._known.values()),
            "parameters": sum(prod(info.shape) for info in self._known.values()),
            "model_type": model.model_type,
            "dtype": model.dtype,
            "load_seconds": time.monotonic() - began,
            **facts,
        }

    # -- requests -------------------------------------------------------------------------------------------------

    def generate(self, requests: Sequence[GenerateRequest]) -> AsyncIterator[Sequence[Delta]]:
        thread = self._running()
        check_requests(requests, self.capabilities, self._vocab_size, self._max_context, thread.version.step)
        return self._generate(thread, requests)

    async def _generate(
        self, thread: StepperThread, requests: Sequence[GenerateRequest]
    ) -> AsyncIterator[Sequence[Delta]]:
        stream = DeltaStream(request.id for request in requests)
        call = [SteppedRequest(request, stream) for request in requests]
        try:
            await self._call(lambda: thread.submit(call))
            async for deltas in stream.items():
                yield deltas
        finally:
            if stream.unfinished:
                _leave(thread, stream)

    async def score(self, sequences: Sequence[Sequence[int]], temperature: float = 1.0) -> Sequence[Sequence[float]]:
        thread = self._running()
        if temperature <= 0:
            raise ValueError(f"temperature {temperature}: log-probs are of logits / temperature; give more than 0")
        for number, sequence in enumerate(sequences):
            fault = check_ids(sequence, self._vocab_size)
            if fault or len(sequence) >= self._max_context:
                long = f"{len(sequence)} tokens, and one more is sampled, pass the context of {self._max_context}"
                raise ValueError(f"sequence {number}: {fault or long}")
        answers = await self._call(lambda: thread.score([tuple(s) for s in sequences], temperature), needs="weights")
        return await asyncio.gather(*map(asyncio.wrap_future, answers))

    async def pause(self) -> None:
        await self._set_paused(True)

    async def resume(self) -> None:
        await self._set_paused(False)

    async def _set_paused(self, paused: bool) -> None:
        thread = self._running()
        await self._call(lambda: setattr(thread, "paused", paused))

    async def abort(self, ids: Sequence[str]) -> None:
        thread, wanted = self._running(), frozenset(ids)
        await self._call(lambda: thread.abort(wanted))

    # -- weights --------------------------------------------------------------------------------------------------

    async def update_weights(self, manifest: Manifest, transport: Chosen) -> Receipt:
        began, times = time.monotonic(), dict[str, float]()
        thread = self._running()
        async with self._changing:
            self._refuse(manifest, thread)
            arrays, arrived = await asyncio.to_thread(self._stage, manifest, self._transport(transport))
            times["wire"] = time.monotonic() - began
            resident = await self._call(lambda: self._load(thread, manifest, arrays, arrived, times), needs="weights")
        layout = self.layout()
        return Receipt(
            self._spec.name, manifest.version, self.capabilities.receipts, combined_fingerprint(arrived),
            time.monotonic() - began, resident=resident, times=times,
            layout=f"{layout} with adapters" if layout and manifest.payload == "lora" else layout,
        )  # fmt: skip

    def _refuse(self, manifest: Manifest, thread: StepperThread) -> None:
        if "weights" in thread.asleep:
            raise ValueError(f"{manifest.version}: {self._spec.name}'s weights are asleep; wake them first")
        if not manifest.version.supersedes(thread.version):
            raise ValueError(
                f"{manifest.version}: this engine has {thread.version}; it loads that model's newer versions only"
            )
        if manifest.payload == "lora":
            return self._refuse_adapter(manifest)
        if manifest.payload == "delta":
            self._refuse_delta(manifest, thread)
        return check_manifest(manifest, self._known, self._dtype)

    def _refuse_delta(self, manifest: Manifest, thread: StepperThread) -> None:
        if self._kept is None:
            switch = switched_off(type(self), "delta", self._options())
            told = f"it takes deltas where engine.{switch} = true" if switch else "it loads full versions"
            raise ValueError(f"{manifest.version}: a delta, and this engine keeps nothing to put it on; {told}")
        have = thread.version
        if manifest.base != str(have):
            raise ValueError(f"{manifest.version}: a delta on top of {manifest.base}; this engine has {have}")
        if self._kept.version != have:
            raise ValueError(
                f"{manifest.version}: a delta, but an adapter lies over the weights here; publish a full version"
            )

    def _takes_deltas(self) -> bool:
        return self.capabilities.delta and not switched_off(type(self), "delta", self._options())

    def _options(self) -> Mapping[str, Any]:
        return dict(self.options)  # type: ignore[call-overload, no-any-return]

    def _refuse_adapter(self, manifest: Manifest) -> None:
        if self._adapters is None:
            raise ValueError(f"{manifest.version}: an adapter, but model.lora is not set for this engine")
        if manifest.base != self._adapters.base:
            raise ValueError(
                f"{manifest.version}: an adapter on top of {manifest.base}; this engine lays them over {self._adapters.base}"
            )

    def _transport(self, chosen: Chosen) -> WeightTransport:
        if chosen.name.rpartition(":")[2] not in self.capabilities.transports:
            raise ValueError(f"transport {chosen.name!r}: this engine takes {sorted(self.capabilities.transports)}")
        if self.build is None:
            raise RuntimeError(f"{type(self).__name__}.build is not set; its host must set it before start")
        key = f"{chosen.name} {sorted(chosen.options.items())}"
        if key not in self._transports:  # kept: one may have mapped what the next version is written into
            built = self.build(chosen)
            if not isinstance(built, WeightTransport):
                raise TypeError(f"transport {chosen.name!r} built a {type(built).__name__}, not a WeightTransport")
            self._transports[key] = built
        return self._transports[key]

    def _stage(self, manifest: Manifest, transport: WeightTransport) -> tuple[Arrays, list[TensorInfo]]:
        """Return the tensors to load, and the list of those that arrived; for whole versions that list grows while they
        are loaded."""
        if manifest.payload == "lora" and self._adapters is not None:
            staged = self._adapters.stage(manifest, transport)
            return self._adapters.laid(staged), staged.arrived
        arrived: list[TensorInfo] = []
        if self._kept is None:
            return _counted(_staged(manifest, transport), arrived), arrived
        if manifest.payload == "delta" and not transport.live:
            for _ in transport.receive(manifest, self._kept.value):  # a damaged one is refused before anything changes
                pass
            return _kept(self._kept, manifest, transport.receive(manifest, self._kept.value), arrived), arrived
        return _kept(self._kept, manifest, _staged(manifest, transport, self._kept.value), arrived), arrived

    def _load(
        self,
        thread: StepperThread,
        manifest: Manifest,
        arrays: Arrays,
        arrived: list[TensorInfo],
        times: dict[str, float],
    ) -> str:
        """On the driving thread, between two tokens: a fingerprint of what lies in memory now."""
        began = time.monotonic()
        try:
            thread.model.load(arrays)
            if missing := {info.name for info in manifest.sent} - {info.name for info in arrived}:
                raise InfrastructureError(f"{manifest.version}: {sorted(missing)[:8]} did not arrive; publish again")
            loaded = time.monotonic()
            resident = _combined(thread.model.checksums())
            thread.renew(manifest.version)
        except Exception as error:
            # Half of two versions may lie in memory now: nothing may be sampled from it.
            thread.fail(f"{type(error).__name__}: {error}")
            raise
        times.update(load=loaded - began, proof=time.monotonic() - loaded)
        return resident

    # -- memory and life ------------------------------------------------------------------------------------------

    async def sleep(self, parts: Sequence[str]) -> int:
        thread, wanted = self._running(), self._parts(parts)

        def fall_asleep() -> int:
            falling = wanted - thread.asleep
            thread.asleep |= wanted
            return thread.model.sleep(falling) if falling else 0

        async with self._changing:
            return await self._call(fall_asleep)

    async def wake(self, parts: Sequence[str]) -> None:
        thread, wanted = self._running(), self._parts(parts)

        def wake_up() -> None:
            if waking := wanted & thread.asleep:
                thread.model.wake(waking)
            thread.asleep -= wanted

        async with self._changing:
            await self._call(wake_up)

    def _parts(self, parts: Sequence[str]) -> frozenset[str]:
        if unknown := sorted(set(parts) - self.sleeps()):
            has = ", ".join(sorted(self.sleeps())) or "none: its sleep needs a GPU"
            raise ValueError(f"parts: got {', '.join(unknown)}; this engine has {has}")
        return frozenset(parts)

    async def health(self) -> Health:
        thread = self._thread
        if thread is None:
            return Health(False, self._spec.version, facts={"failure": "not started"})
        facts = {
            "failure": thread.failure, "paused": thread.paused, "asleep": tuple(sorted(thread.asleep)),
            "prompt_tokens": thread.prompt_tokens, "cached_tokens": thread.cached_tokens,
        }  # fmt: skip
        return Health(not thread.failure, thread.version, thread.open, 0, facts)

    async def stop(self) -> None:
        thread = self._thread
        if thread is None:
            return
        # A thread that has ended already needs no telling.
        with contextlib.suppress(InfrastructureError):
            thread.call(thread.stop)
        if not await asyncio.to_thread(thread.join, _STOP_S):
            raise InfrastructureError(f"{self._spec.name}: a step runs for over {_STOP_S:.0f} s; kill the process")

    def _running(self) -> StepperThread:
        if self._thread is None:
            raise InfrastructureError(f"{self._spec.name}: not started; call start first")
        return self._thread

    async def _call(self, function: Callable[[], T], needs: str = "") -> T:
        """Run on the driving thread; refused where a part it needs sleeps."""
        return await self._running().ask(function, needs)


def _staged(manifest: Manifest, transport: WeightTransport, resident: Resident | None = None) -> Arriving:
    """Return the arriving tensors. A stored version is checked whole before anything changes; of a live one only the
    first tensor is fetched."""
    arriving = transport.receive(manifest, resident)
    if not transport.live:
        return iter(list(arriving))
    first = next(arriving, None)
    return iter(()) if first is None else chain([first], arriving)


def _counted(arriving: Arriving, arrived: list[TensorInfo]) -> Arrays:
    for info, array in arriving:
        arrived.append(info)
        yield info.name, array, info.dtype


def _kept(kept: DeltaBase, manifest: Manifest, arriving: Arriving, arrived: list[TensorInfo]) -> Arrays:
    for info, array, came in kept.follow(manifest, arriving):
        if came:
            arrived.append(info)
        yield info.name, array, info.dtype


def _combined(checksums: Mapping[str, str]) -> str:
    from hashlib import sha256

    return sha256(repr(sorted(checksums.items())).encode()).hexdigest() if checksums else ""


def _leave(thread: StepperThread, stream: DeltaStream) -> None:
    """The reader is gone: free what it asked for."""
    with contextlib.suppress(InfrastructureError):
        thread.call(lambda: thread.withdraw(stream))
