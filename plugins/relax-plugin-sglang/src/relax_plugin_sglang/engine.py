# SPDX-License-Identifier: Apache-2.0
"""The SGLang engine: SGLang's scheduler and model in this process, stepped by one thread.

SGLang fuses weights in its own layout, so weight fingerprints are compared only between engines of the same layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from relax_core.api.engine import Capabilities, EngineSpec
from relax_core.engine_kit.stepped_engine import SteppedEngine, Stepper
from relax_plugin_sglang.environment_variables import on_gpu, prepare
from relax_plugin_sglang.options import SglangOptions

if TYPE_CHECKING:
    from relax_plugin_sglang.model import Sglang


class SglangEngine(SteppedEngine[SglangOptions]):
    """An engine that runs one model with SGLang, on a CPU or one GPU; SGLang's globals allow one engine per process."""

    capabilities: ClassVar[Capabilities] = Capabilities(
        in_flight_updates=True, keeps_kv_across_versions=True, seeds=True, delta=True, lora=True, score=True,
        routed_experts=True, float32_head=True, media=frozenset({"image", "video"}),
        receipts="resident", transports=frozenset({"shared-memory", "disk", "http", "collective"}),
    )  # fmt: skip
    switches: ClassVar[Mapping[str, str]] = {"delta": "keep_weights"}

    def devices(self) -> int:
        return 1

    def prepare(self) -> Mapping[str, Any]:
        prepare()
        return {"device": "cuda" if on_gpu() else "cpu"}

    def check_start(self, here: bool = True) -> None:
        prepare()
        _stepper_class()

    def make(self, spec: EngineSpec) -> Stepper:
        return _stepper_class()(spec, self.options)

    def layout(self) -> str:
        return f"sglang {self._dtype} on {'cuda' if on_gpu() else 'cpu'}"


def _stepper_class() -> type[Sglang]:
    """Import SGLang, on a machine without a GPU with stand-ins for the packages that need CUDA."""
    if not on_gpu():
        from relax_plugin_sglang.cpu_stand_ins import install

        install(gpu=False)
    from relax_plugin_sglang.model import Sglang

    return Sglang
