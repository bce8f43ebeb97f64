# SPDX-License-Identifier: Apache-2.0
"""The transformers engine: batched generation on one decoding thread.

`Decoder` samples, forms batches and holds KV caches. New weights overwrite the old weights in memory. Caches of running
requests are then recomputed, or kept if `kv_across_versions` is set. The engine holds exactly the published tensors, so
their fingerprint equals the manifest's and proves the version in the engine's receipt.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from relax_core.api.engine import Capabilities, Delta, EngineSpec, GenerateRequest
from relax_core.api.errors import InfrastructureError
from relax_core.api.plan import Estimate, Workload
from relax_core.api.weights import PLAIN, Manifest, Resident as ValueOf, combined_fingerprint
from relax_core.engine_kit.model_weights import StagedAdapter
from relax_core.engine_kit.threaded_engine import Arriving, ThreadedEngine
from relax_core.media.store import RESTORE_S, MediaStore
from relax_plugin_transformers.estimate import estimate
from relax_plugin_transformers.loading import context_limit, load_model
from relax_plugin_transformers.options import TransformersOptions

if TYPE_CHECKING:
    from relax_plugin_transformers.decoder import Decoder
    from relax_plugin_transformers.weights import Adapters, Resident


class TransformersEngine(ThreadedEngine["Decoder", TransformersOptions]):
    """Batched generation with Hugging Face models, on a CPU or one GPU."""

    capabilities: ClassVar[Capabilities] = Capabilities(
        in_flight_updates=True, keeps_kv_across_versions=True, seeds=True, delta=True, lora=True, score=True,
        offloads=frozenset({"weights", "kv"}), media=frozenset({"image", "video", "audio"}), routed_experts=True,
        float32_head=True,
        receipts="resident", transports=frozenset({"shared-memory", "disk", "http", "collective"}),
    )  # fmt: skip
    preload: ClassVar[tuple[str, ...]] = (
        "relax_plugin_transformers.decoder", "relax_plugin_transformers.weights", "transformers.modeling_utils",
        "transformers.masking_utils",
    )  # fmt: skip
    _weights: Resident
    _adapters: Adapters

    def check_start(self, here: bool = True) -> None:
        from relax_plugin_transformers.loading import choose_device

        super().check_start(here)
        if here:
            choose_device(self.options.device)

    def estimate(self, spec: EngineSpec, work: Workload) -> Estimate:
        return estimate(spec, self.options, work)

    async def start(self, spec: EngineSpec) -> Mapping[str, Any]:
        began = time.monotonic()
        facts = await asyncio.to_thread(self._start, spec)
        return {**facts, "load_seconds": time.monotonic() - began}

    def _start(self, spec: EngineSpec) -> Mapping[str, Any]:
        import torch

        from relax_core.learn.huggingface import use_float32_head
        from relax_plugin_transformers.decoder import Decoder
        from relax_plugin_transformers.model import CausalModel
        from relax_plugin_transformers.weights import Adapters, Resident

        if spec.deterministic:
            torch.use_deterministic_algorithms(True, warn_only=True)
        module = load_model(spec.model, self.options)
        if spec.model.get("head_dtype") == "float32":
            use_float32_head(module)
        self._spec, self._max_context = spec, context_limit(module, spec.max_context)
        self._weights = Resident(module)
        self._adapters, self._known = Adapters(self._weights), self._weights.infos()
        self._base = combined_fingerprint(self._known.values())
        store = MediaStore(spec.media, restore_s=RESTORE_S) if spec.media else None
        model = CausalModel(module, self.options.max_prefill_tokens, store)
        self._vocab_size = model.vocab_size
        self._thread = Decoder(
            model, spec.version, self.options, rows=spec.max_concurrency or self.options.max_batch_rows,
            serial=spec.deterministic, keeps_caches=spec.kv_across_versions,
        )  # fmt: skip
        self._thread.start()
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
        deltas, model = super().generate(requests), self._running().model
        for tokens, media in {(request.tokens, request.media) for request in requests}:
            if fault := model.misplaced(tokens, media):
                raise ValueError(f"a prompt of {len(tokens)} tokens: {fault}")
        if model.routing_recorder.routing is None and any(request.routed_experts for request in requests):
            raise ValueError("routed_experts: this model has no routers that can be recorded; leave it out")
        return deltas

    async def _score(
        self, thread: Decoder, sequences: Sequence[Sequence[int]], temperature: float
    ) -> Sequence[Sequence[float]]:
        return await thread.ask(lambda: thread.model.score(sequences, temperature), needs="weights")

    def _delta_base(self) -> ValueOf:
        return self._weights.value

    def _layout(self, payload: str) -> str:
        # The matrix products of adapters differ in a few bits between types of device.
        return PLAIN if payload != "lora" else f"{PLAIN}+adapter on {self._running().model.device.type}"

    def _load(self, thread: Decoder, manifest: Manifest, staged: Arriving | StagedAdapter) -> None:
        if isinstance(staged, StagedAdapter):
            self._adapters.load(staged)
        else:
            self._weights.load(manifest, staged)
            self._adapters.forget()

    def _prove(self, thread: Decoder, manifest: Manifest) -> str:
        have = combined_fingerprint(self._weights.infos().values())
        if manifest.payload != "lora":
            if have != manifest.fingerprint:
                want = manifest.fingerprint
                raise InfrastructureError(f"{manifest.version}: {self._spec.name} has fingerprint {have}, want {want}")
            self._base = have
        return have

    def _offload(self, thread: Decoder, parts: frozenset[str]) -> int:
        freed = thread.drop_caches()
        return freed + (self._weights.release() + self._adapters.release() if "weights" in parts else 0)

    def _onload(self, thread: Decoder, parts: frozenset[str]) -> None:
        if "weights" in parts:
            self._weights.restore()
            self._adapters.restore()

    async def stop(self) -> None:
        await super().stop()
        if self._thread is not None:
            self._weights.close()
            self._adapters.forget()
