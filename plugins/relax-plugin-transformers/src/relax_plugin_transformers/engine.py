# SPDX-License-Identifier: Apache-2.0
"""The transformers engine: async outside, one decoding thread inside.

It translates between the engine contract and `Decoder`; sampling, batching and caches live there. Weights are
replaced between two iterations; caches of running requests are recomputed under the new ones, or kept where asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from relax_core.api.component import Configurable
from relax_core.api.engine import Capabilities, Delta, Engine, EngineSpec, GenerateRequest, Health
from relax_core.api.errors import InfrastructureError
from relax_core.api.estimate import Estimate, Workload
from relax_core.api.trainer import Chosen
from relax_core.api.weights import PLAIN, Manifest, Receipt, TensorInfo, WeightTransport, combined_fingerprint
from relax_core.engine_kit.requests import check_ids, check_requests
from relax_core.media.store import MediaStore
from relax_plugin_transformers.estimate import estimate
from relax_plugin_transformers.loading import context_limit, load_model, read_config
from relax_plugin_transformers.options import TransformersOptions

if TYPE_CHECKING:
    from relax_core.engine_kit.engine_thread import DeltaStream
    from relax_plugin_transformers.adapter import Adapters
    from relax_plugin_transformers.decoder import Decoder
    from relax_plugin_transformers.resident import Resident

T = TypeVar("T")
_PARTS = frozenset({"weights", "kv"})
_STOP_S = 30.0
"""One iteration of a large model on a small machine ends within this."""


class TransformersEngine(Engine[TransformersOptions]):
    """Batched generation with Hugging Face models, on a CPU or one GPU."""

    capabilities: ClassVar[Capabilities] = Capabilities(
        in_flight_updates=True, keeps_kv_across_versions=True, seeds=True, delta=True, lora=True, score=True, sleep=_PARTS,
        media=frozenset({"image", "video", "audio"}), routed_experts=True,
        receipts="resident", transports=frozenset({"shared-memory", "disk", "http", "collective"}),
    )  # fmt: skip

    build: Callable[[Chosen], Configurable] | None = None
    """Makes a weight transport; set by the worker's host before `start`."""

    def __init__(self, options: TransformersOptions | None = None) -> None:
        super().__init__(options)
        self._decoder: Decoder | None = None
        self._weights: Resident | None = None
        self._adapters: Adapters
        self._transports: dict[str, WeightTransport] = {}
        self._base = ""
        """Fingerprint of the whole model below any adapter."""
        self._spec = EngineSpec(model={}, max_context=0)
        self._max_context = 0
        # One update or sleep at a time: what is staged must still fit when it is swapped in.
        self._changing = asyncio.Lock()

    def estimate(self, spec: EngineSpec, work: Workload) -> Estimate:
        return estimate(spec, self.options, work)

    async def start(self, spec: EngineSpec) -> Mapping[str, Any]:
        began = time.monotonic()
        facts = await asyncio.to_thread(self._start, spec)
        return {**facts, "load_seconds": time.monotonic() - began}

    def _start(self, spec: EngineSpec) -> Mapping[str, Any]:
        import torch

        from relax_plugin_transformers.adapter import Adapters
        from relax_plugin_transformers.decoder import Decoder
        from relax_plugin_transformers.model import CausalModel
        from relax_plugin_transformers.resident import Resident

        if spec.deterministic:
            torch.use_deterministic_algorithms(True, warn_only=True)
        module = load_model(spec.model, self.options)
        self._spec, self._max_context = spec, context_limit(module, spec.max_context)
        self._weights = Resident(module)
        self._adapters, self._base = Adapters(self._weights, spec.model.get("lora")), self._weights.fingerprint()
        store = MediaStore(spec.media) if spec.media else None
        model = CausalModel(module, self.options.max_prefill_tokens, store)
        rows = spec.max_concurrency or self.options.max_batch_rows
        self._decoder = Decoder(
            model,
            spec.version,
            self.options,
            rows=rows,
            serial=spec.deterministic,
            keeps_caches=spec.kv_across_versions,
        )
        self._decoder.start()
        return {
            "vocab_size": model.vocab_size,
            "max_context": self._max_context,
            "fingerprint": self._base,
            "parameters": sum(tensor.numel() for tensor in self._weights.tensors.values()),
            "model_type": module.config.model_type,
            "device": str(model.device),
            "dtype": str(next(module.parameters()).dtype).removeprefix("torch."),
            "threads": torch.get_num_threads(),
        }

    def generate(self, requests: Sequence[GenerateRequest]) -> AsyncIterator[Sequence[Delta]]:
        decoder = self._running()
        check_requests(requests, self.capabilities, decoder.model.vocab_size, self._max_context, decoder.version.step)
        for tokens, media in {(request.tokens, request.media) for request in requests}:
            if fault := decoder.model.misplaced(tokens, media):
                raise ValueError(f"a prompt of {len(tokens)} tokens: {fault}")
        if decoder.model.routes.routing is None and any(request.routed_experts for request in requests):
            raise ValueError("routed_experts asked for, but this model has no routers that can be watched")
        return self._generate(decoder, requests)

    async def _generate(self, decoder: Decoder, requests: Sequence[GenerateRequest]) -> AsyncIterator[Sequence[Delta]]:
        from relax_core.engine_kit.engine_thread import DeltaStream
        from relax_plugin_transformers.batch import Running

        stream = DeltaStream(request.id for request in requests)
        call = [Running(request, stream) for request in requests]
        try:
            await self._call(lambda: decoder.submit(call))
            async for deltas in stream.items():
                yield deltas
        finally:
            if stream.unfinished:
                _leave(decoder, stream)

    async def score(self, sequences: Sequence[Sequence[int]], temperature: float = 1.0) -> Sequence[Sequence[float]]:
        decoder = self._running()
        if temperature <= 0:
            raise ValueError(f"temperature {temperature}: log-probs are of logits / temperature; give more than 0")
        for number, sequence in enumerate(sequences):
            fault = check_ids(sequence, decoder.model.vocab_size)
            if fault or len(sequence) > self._max_context:
                raise ValueError(
                    f"sequence {number}: {fault or f'{len(sequence)} tokens pass the context of {self._max_context}'}"
                )
        return await self._call(lambda: decoder.model.score(sequences, temperature), needs="weights")

    async def update_weights(self, manifest: Manifest, transport: Chosen) -> Receipt:
        began = time.monotonic()
        decoder, weights = self._running(), self._resident()
        async with self._changing:
            self._refuse(manifest)
            if manifest.payload == "lora":
                return await self._lay(decoder, manifest, self._transport(transport), began)
            staged = await asyncio.to_thread(weights.stage, manifest, self._transport(transport))
            times = {"wire": time.monotonic() - began}

            def load() -> None:
                weights.load(manifest, staged)
                self._adapters.forget()

            infos = await self._call(lambda: self._swap(decoder, manifest, load, times), needs="weights")
            self._base = manifest.fingerprint
        sent = frozenset(info.name for info in manifest.sent)
        wire = combined_fingerprint(info for info in infos if info.name in sent)
        return self._receipt(manifest, wire, infos, PLAIN, times, began)

    async def _lay(self, decoder: Decoder, manifest: Manifest, transport: WeightTransport, began: float) -> Receipt:
        """An adapter, over the base that this engine has."""
        from relax_plugin_transformers.adapter import LAYOUT

        staged = await asyncio.to_thread(self._adapters.stage, manifest, transport)
        times = {"wire": time.monotonic() - began}
        infos = await self._call(
            lambda: self._swap(decoder, manifest, lambda: self._adapters.load(staged), times), needs="weights"
        )
        layout = f"{LAYOUT} on {decoder.model.device.type}"
        return self._receipt(manifest, staged.wire, infos, layout, times, began)

    def _receipt(
        self, manifest: Manifest, wire: str, infos: Sequence[TensorInfo], layout: str, times: Mapping[str, float],
        began: float,
    ) -> Receipt:  # fmt: skip
        return Receipt(
            self._spec.name, manifest.version, "resident", wire, time.monotonic() - began,
            resident=combined_fingerprint(infos), layout=layout, times=times,
        )  # fmt: skip

    def _refuse(self, manifest: Manifest) -> None:
        decoder, version = self._running(), manifest.version
        have = decoder.version
        if "weights" in decoder.asleep:
            raise ValueError(f"{version}: {self._spec.name}'s weights are asleep; wake them first")
        if not version.supersedes(have):
            raise ValueError(f"{version}: this engine has {have}; it loads that model's newer versions only")
        if manifest.payload == "delta" and manifest.base != str(have):
            raise ValueError(f"{version}: a delta on top of {manifest.base}; this engine has {have}")
        if manifest.payload == "delta" and self._adapters.laid:
            raise ValueError(f"{version}: a delta, but an adapter lies over its base here; publish a full version")
        if manifest.payload == "lora" and manifest.base != self._base:
            raise ValueError(f"{version}: an adapter on top of {manifest.base}; this engine's base is {self._base}")

    def _transport(self, chosen: Chosen) -> WeightTransport:
        if chosen.name.rpartition(":")[2] not in self.capabilities.transports:
            raise ValueError(f"transport {chosen.name!r}: this engine takes {sorted(self.capabilities.transports)}")
        if self.build is None:
            raise RuntimeError("TransformersEngine.build is not set; its host must set it before start")
        key = f"{chosen.name} {sorted(chosen.options.items())}"
        if key not in self._transports:  # kept: one may have mapped what the next version is written into
            built = self.build(chosen)
            if not isinstance(built, WeightTransport):
                raise TypeError(f"transport {chosen.name!r} built a {type(built).__name__}, not a WeightTransport")
            self._transports[key] = built
        return self._transports[key]

    def _swap(
        self, decoder: Decoder, manifest: Manifest, load: Callable[[], None], times: dict[str, float]
    ) -> tuple[TensorInfo, ...]:
        """On the decoding thread: old tokens leave under the old version, the next is of the new one."""
        decoder.flush()
        weights, began = self._resident(), time.monotonic()
        try:
            load()
            loaded = time.monotonic()
            infos = weights.infos()
            whole = manifest.payload != "lora"
            if whole and (have := combined_fingerprint(infos)) != manifest.fingerprint:
                raise InfrastructureError(
                    f"{manifest.version}: {self._spec.name} holds {have}, want {manifest.fingerprint}"
                )
        except Exception as error:
            # Half of two versions may lie in memory now: nothing may be sampled from it.
            decoder.fail(f"{type(error).__name__}: {error}")
            raise
        times.update(load=loaded - began, proof=time.monotonic() - loaded)
        decoder.renew(manifest.version)
        return infos

    async def pause(self) -> None:
        await self._set_paused(True)

    async def resume(self) -> None:
        await self._set_paused(False)

    async def _set_paused(self, paused: bool) -> None:
        decoder = self._running()
        await self._call(lambda: setattr(decoder, "paused", paused))

    async def abort(self, ids: Sequence[str]) -> None:
        decoder, wanted = self._running(), frozenset(ids)
        await self._call(lambda: decoder.abort(wanted))

    async def sleep(self, parts: Sequence[str]) -> int:
        decoder, weights, wanted = self._running(), self._resident(), _parts(parts)

        def fall_asleep() -> int:
            decoder.asleep |= wanted
            freed = decoder.drop_caches() if wanted else 0
            return freed + (weights.release() + self._adapters.release() if "weights" in wanted else 0)

        async with self._changing:
            return await self._call(fall_asleep)

    async def wake(self, parts: Sequence[str]) -> None:
        decoder, weights, wanted = self._running(), self._resident(), _parts(parts)

        def wake_up() -> None:
            if "weights" in wanted:
                weights.restore()
                self._adapters.restore()
            decoder.asleep -= wanted

        async with self._changing:
            await self._call(wake_up)

    async def health(self) -> Health:
        decoder = self._decoder
        if decoder is None:
            return Health(False, self._spec.version, facts={"failure": "not started"})
        facts = {"failure": decoder.failure, "paused": decoder.paused, "asleep": tuple(sorted(decoder.asleep))}
        return Health(not decoder.failure, decoder.version, decoder.running, decoder.waiting, facts)

    async def stop(self) -> None:
        decoder = self._decoder
        if decoder is None:
            return
        # A thread that has ended already needs no telling.
        with contextlib.suppress(InfrastructureError):
            decoder.call(decoder.stop)
        if not await asyncio.to_thread(decoder.join, _STOP_S):
            raise InfrastructureError(
                f"{self._spec.name}: an iteration runs for over {_STOP_S:.0f} s; kill the process"
            )
        self._resident().forget_aside()
        self._adapters.forget()

    def check(self, model: Mapping[str, Any]) -> None:
        read_config(model)

    def _running(self) -> Decoder:
        if self._decoder is None:
            raise InfrastructureError(f"{self._spec.name}: not started; call start first")
        return self._decoder

    def _resident(self) -> Resident:
        if self._weights is None:
            raise InfrastructureError(f"{self._spec.name}: not started; call start first")
        return self._weights

    async def _call(self, function: Callable[[], T], needs: str = "") -> T:
        """Run on the decoding thread; refused where a part it needs sleeps."""
        return await self._running().ask(function, needs)


def _leave(decoder: Decoder, stream: DeltaStream) -> None:
    """The reader is gone: free what it asked for."""
    with contextlib.suppress(InfrastructureError):
        decoder.call(lambda: decoder.withdraw(stream))


def _parts(parts: Sequence[str]) -> frozenset[str]:
    if unknown := sorted(set(parts) - _PARTS):
        raise ValueError(f"parts: got {', '.join(unknown)}; this engine has {', '.join(sorted(_PARTS))}")
    return frozenset(parts)
