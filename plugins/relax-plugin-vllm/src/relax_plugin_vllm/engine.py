# SPDX-License-Identifier: Apache-2.0
"""The vLLM engine: async outside, one driving thread inside. It translates between the engine contract and `Driver`.

vLLM fuses, shards and packs weights in its own way, so what lies in memory is compared among engines of one layout; on a
CPU most of it lies where it can't be read, and the proof is of the bytes that arrived.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from relax_core.api.component import Configurable
from relax_core.api.delta_stream import Stream
from relax_core.api.engine import Capabilities, Delta, Engine, EngineSpec, GenerateRequest, Health
from relax_core.api.errors import InfrastructureError
from relax_core.api.request_checks import check_ids, check_requests
from relax_core.api.trainer import Chosen
from relax_core.api.weights import Manifest, Receipt, TensorInfo, WeightTransport, combined_fingerprint
from relax_plugin_vllm.driver import Driver, Running
from relax_plugin_vllm.environment import on_gpu, prepare
from relax_plugin_vllm.folder import check_manifest, tensors
from relax_plugin_vllm.options import VllmOptions

if TYPE_CHECKING:
    import numpy as np

T = TypeVar("T")
Arriving = Iterator[tuple[TensorInfo, "np.ndarray"]]
_PARTS = frozenset({"weights", "kv"})
_TAGS = {"weights": "weights", "kv": "kv_cache"}
_STOP_S = 30.0
_SAFETENSORS = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "float64": "F64"}


class VllmEngine(Engine[VllmOptions]):
    """vLLM with its core in this process."""

    capabilities: ClassVar[Capabilities] = Capabilities(
        in_flight_updates=True, keeps_kv_across_versions=True, seeds=True, score=True,
        sleep=_PARTS if on_gpu() else frozenset(), receipts="resident" if on_gpu() else "wire",
        transports=frozenset({"shared-memory", "disk", "http", "collective"}),
    )  # fmt: skip

    build: Callable[[Chosen], Configurable] | None = None
    """Makes a weight transport; set by the worker's host before `start`."""

    def __init__(self, options: VllmOptions | None = None) -> None:
        super().__init__(options)
        self._driver: Driver | None = None
        self._transports: dict[str, WeightTransport] = {}
        self._spec = EngineSpec(model={}, max_context=0)
        self._known: dict[str, TensorInfo] = {}
        self._vocab_size = self._max_context = 0
        self._dtype = ""
        # One update or sleep at a time: what is staged must still fit when it is loaded.
        self._changing = asyncio.Lock()

    async def start(self, spec: EngineSpec) -> Mapping[str, Any]:
        began = time.monotonic()
        prepare()
        self._spec = spec
        self._known = await asyncio.to_thread(tensors, str(spec.model["path"]))
        self._driver = Driver(self._make, spec.version, spec.kv_across_versions)
        model = await asyncio.wrap_future(self._driver.start())
        self._vocab_size, self._max_context = model.vocab_size, model.max_context
        self._dtype = _SAFETENSORS.get(model.dtype, model.dtype)
        return {
            "vocab_size": model.vocab_size,
            "max_context": model.max_context,
            "fingerprint": combined_fingerprint(self._known.values()),
            "parameters": sum(_elements(info.shape) for info in self._known.values()),
            "model_type": model.model_type,
            "device": "cuda" if on_gpu() else "cpu",
            "dtype": model.dtype,
            "load_seconds": time.monotonic() - began,
        }

    def _make(self) -> Any:
        from relax_plugin_vllm.model import Vllm

        return Vllm(self._spec, self.options)

    # -- requests -------------------------------------------------------------------------------------------------

    def generate(self, requests: Sequence[GenerateRequest]) -> AsyncIterator[Sequence[Delta]]:
        driver = self._running()
        check_requests(requests, self.capabilities, self._vocab_size, self._max_context, driver.version.step)
        return self._generate(driver, requests)

    async def _generate(self, driver: Driver, requests: Sequence[GenerateRequest]) -> AsyncIterator[Sequence[Delta]]:
        stream = Stream(request.id for request in requests)
        call = [Running(request, stream) for request in requests]
        try:
            await self._call(lambda: driver.submit(call))
            async for deltas in stream.items():
                yield deltas
        finally:
            if stream.unfinished:
                _leave(driver, stream)

    async def score(self, sequences: Sequence[Sequence[int]], temperature: float = 1.0) -> Sequence[Sequence[float]]:
        driver = self._running()
        if temperature <= 0:
            raise ValueError(f"temperature {temperature}: log-probs are of logits / temperature; give more than 0")
        for number, sequence in enumerate(sequences):
            fault = check_ids(sequence, self._vocab_size)
            if fault or len(sequence) >= self._max_context:
                long = f"{len(sequence)} tokens, and vLLM samples one more, pass the context of {self._max_context}"
                raise ValueError(f"sequence {number}: {fault or long}")
        answers = await self._call(lambda: driver.score([tuple(s) for s in sequences], temperature), needs="weights")
        return await asyncio.gather(*map(asyncio.wrap_future, answers))

    async def pause(self) -> None:
        await self._set_paused(True)

    async def resume(self) -> None:
        await self._set_paused(False)

    async def _set_paused(self, paused: bool) -> None:
        driver = self._running()
        await self._call(lambda: setattr(driver, "paused", paused))

    async def abort(self, ids: Sequence[str]) -> None:
        driver, wanted = self._running(), frozenset(ids)
        await self._call(lambda: driver.abort(wanted))

    # -- weights --------------------------------------------------------------------------------------------------

    async def update_weights(self, manifest: Manifest, transport: Chosen) -> Receipt:
        began, times = time.monotonic(), dict[str, float]()
        driver = self._running()
        async with self._changing:
            self._refuse(manifest, driver)
            arriving = await asyncio.to_thread(_staged, manifest, self._transport(transport))
            times["wire"] = time.monotonic() - began
            arrived, resident = await self._call(lambda: self._load(driver, manifest, arriving, times), needs="weights")
        return Receipt(
            self._spec.name, manifest.version, self.capabilities.receipts, combined_fingerprint(arrived),
            time.monotonic() - began, resident=resident, layout=self._layout, times=times,
        )  # fmt: skip

    @property
    def _layout(self) -> str:
        o = self.options
        return (
            f"vllm {self._dtype} tp{o.tensor_parallel} pp{o.pipeline_parallel} ep{o.expert_parallel:d}"
            if on_gpu()
            else ""
        )

    def _refuse(self, manifest: Manifest, driver: Driver) -> None:
        if "weights" in driver.asleep:
            raise ValueError(f"{manifest.version}: {self._spec.name}'s weights are asleep; wake them first")
        if not manifest.version.supersedes(driver.version):
            raise ValueError(
                f"{manifest.version}: this engine has {driver.version}; it loads that model's newer versions only"
            )
        if manifest.payload != "full":
            raise ValueError(f"{manifest.version}: payload {manifest.payload!r}; this engine loads full versions")
        check_manifest(manifest, self._known, self._dtype)

    def _transport(self, chosen: Chosen) -> WeightTransport:
        if chosen.name.rpartition(":")[2] not in self.capabilities.transports:
            raise ValueError(f"transport {chosen.name!r}: this engine takes {sorted(self.capabilities.transports)}")
        if self.build is None:
            raise RuntimeError("VllmEngine.build is not set; its host must set it before start")
        key = f"{chosen.name} {sorted(chosen.options.items())}"
        if key not in self._transports:  # kept: one may have mapped what the next version is written into
            built = self.build(chosen)
            if not isinstance(built, WeightTransport):
                raise TypeError(f"transport {chosen.name!r} built a {type(built).__name__}, not a WeightTransport")
            self._transports[key] = built
        return self._transports[key]

    def _load(
        self, driver: Driver, manifest: Manifest, arriving: Arriving, times: dict[str, float]
    ) -> tuple[list[TensorInfo], str]:
        """On the driving thread, between two tokens: what arrived, and a fingerprint of what lies in memory now."""
        began, arrived = time.monotonic(), list[TensorInfo]()

        def counted() -> Iterator[tuple[str, np.ndarray, str]]:
            for info, array in arriving:
                arrived.append(info)
                yield info.name, array, info.dtype

        try:
            driver.model.load(counted())
            if missing := {info.name for info in manifest.tensors} - {info.name for info in arrived}:
                raise InfrastructureError(f"{manifest.version}: {sorted(missing)[:8]} did not arrive; publish again")
        except Exception as error:
            # Half of two versions may lie in memory now: nothing may be sampled from it.
            driver.fail(f"{type(error).__name__}: {error}")
            raise
        loaded = time.monotonic()
        resident = _combined(driver.model.checksums()) if on_gpu() else ""
        driver.renew(manifest.version)
        times.update(load=loaded - began, proof=time.monotonic() - loaded)
        return arrived, resident

    # -- memory and life ------------------------------------------------------------------------------------------

    async def sleep(self, parts: Sequence[str]) -> int:
        import torch

        driver, wanted = self._running(), self._parts(parts)

        def fall_asleep() -> int:
            if driver.asleep or not wanted:
                driver.asleep |= wanted
                return 0
            free = torch.cuda.mem_get_info()[0]
            driver.asleep |= wanted
            driver.model.forget_caches(running=True)
            driver.model.sleep()
            if missing := _PARTS - wanted:  # vLLM lays both down: what was not asked for comes back
                driver.model.wake([_TAGS[part] for part in missing])
            return max(0, torch.cuda.mem_get_info()[0] - free)

        async with self._changing:
            return await self._call(fall_asleep)

    async def wake(self, parts: Sequence[str]) -> None:
        driver, wanted = self._running(), self._parts(parts)

        def wake_up() -> None:
            if tags := [_TAGS[part] for part in sorted(wanted & driver.asleep)]:
                driver.model.wake(tags)
            driver.asleep -= wanted

        async with self._changing:
            await self._call(wake_up)

    def _parts(self, parts: Sequence[str]) -> frozenset[str]:
        if unknown := sorted(set(parts) - self.capabilities.sleep):
            has = ", ".join(sorted(self.capabilities.sleep)) or "none: vLLM's sleep needs a GPU"
            raise ValueError(f"parts: got {', '.join(unknown)}; this engine has {has}")
        return frozenset(parts)

    async def health(self) -> Health:
        driver = self._driver
        if driver is None:
            return Health(False, self._spec.version, facts={"failure": "not started"})
        facts = {"failure": driver.failure, "paused": driver.paused, "asleep": tuple(sorted(driver.asleep))}
        return Health(not driver.failure, driver.version, driver.open, 0, facts)

    async def stop(self) -> None:
        driver = self._driver
        if driver is None:
            return
        # A thread that has ended already needs no telling.
        with contextlib.suppress(InfrastructureError):
            driver.call(driver.stop)
        if not await asyncio.to_thread(driver.join, _STOP_S):
            raise InfrastructureError(f"{self._spec.name}: a step runs for over {_STOP_S:.0f} s; kill the process")

    def _running(self) -> Driver:
        if self._driver is None:
            raise InfrastructureError(f"{self._spec.name}: not started; call start first")
        return self._driver

    async def _call(self, function: Callable[[], T], needs: str = "") -> T:
        """Run on the driving thread; refused where a part it needs sleeps."""
        driver = self._running()

        def guarded() -> T:
            if needs in driver.asleep:
                raise ValueError(f"{self._spec.name}: {needs} asleep; wake them first")
            return function()

        return await asyncio.wrap_future(driver.call(guarded))


def _staged(manifest: Manifest, transport: WeightTransport) -> Arriving:
    """What is stored is checked whole before anything changes; of a live version only the first tensor is here."""
    arriving = transport.receive(manifest)
    if not transport.live:
        return iter(list(arriving))
    first = next(arriving, None)
    return iter(()) if first is None else chain([first], arriving)


def _combined(checksums: Mapping[str, str]) -> str:
    from hashlib import sha256

    return sha256(repr(sorted(checksums.items())).encode()).hexdigest()


def _elements(shape: Sequence[int]) -> int:
    from math import prod

    return prod(shape)


def _leave(driver: Driver, stream: Stream) -> None:
    """The reader is gone: free what it asked for."""
    with contextlib.suppress(InfrastructureError):
        driver.call(lambda: driver.withdraw(stream))
