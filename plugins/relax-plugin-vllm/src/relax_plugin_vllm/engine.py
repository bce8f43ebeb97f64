# SPDX-License-Identifier: Apache-2.0
"""The vLLM engine: vLLM's core in this process, stepped by one thread.

vLLM fuses, shards and packs weights in its own layout, so weight fingerprints are compared only between engines of the
same layout. On a CPU most weights can't be read back, so the receipt proves only the bytes that arrived.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, ClassVar

from relax_core.api.engine import Capabilities, EngineSpec
from relax_core.api.errors import ConfigError
from relax_core.engine_kit.stepped_engine import SteppedEngine, Stepper
from relax_plugin_vllm.environment_variables import on_gpu, prepare
from relax_plugin_vllm.options import VllmOptions


class VllmEngine(SteppedEngine[VllmOptions]):
    """An engine that runs one model with vLLM, on a CPU or on GPUs."""

    capabilities: ClassVar[Capabilities] = Capabilities(
        in_flight_updates=True, keeps_kv_across_versions=True, seeds=True, delta=True, lora=True, score=True,
        media=frozenset({"image", "video"}), float32_head=True,
        offloads=frozenset({"weights", "kv"}), offloads_on_cpu=False, receipts="resident" if on_gpu() else "wire",
        transports=frozenset({"shared-memory", "disk", "http", "collective"}),
    )  # fmt: skip
    switches: ClassVar[Mapping[str, str]] = {"delta": "keep_weights"}

    def devices(self) -> int:
        return self.options.tensor_parallel * self.options.pipeline_parallel

    def offloadable(self) -> frozenset[str]:
        return super().offloadable() if on_gpu() else frozenset()

    def prepare(self) -> Mapping[str, Any]:
        if (stages := self.options.pipeline_parallel) > 1 and not on_gpu():
            fix = "vLLM runs stages on GPUs only; set it to 1, or use engine.tensor_parallel, which also works on a CPU"
            raise ConfigError("engine.pipeline_parallel", stages, fix)
        prepare()
        return {"device": "cuda" if on_gpu() else "cpu"}

    def check_start(self, here: bool = True) -> None:
        prepare()
        import_module("relax_plugin_vllm.model")

    def make(self, spec: EngineSpec) -> Stepper:
        from relax_plugin_vllm.model import Vllm

        return Vllm(spec, self.options)

    async def profile(self, path: str, max_bytes: int) -> None:
        if self.devices() > 1:
            raise NotImplementedError("the model runs in vLLM's own processes, which this engine does not profile")
        await super().profile(path, max_bytes)

    def layout(self) -> str:
        o = self.options
        places = f"tp{o.tensor_parallel} pp{o.pipeline_parallel} ep{o.expert_parallel:d}"
        return f"vllm {self._dtype} {places}" if on_gpu() else ""
