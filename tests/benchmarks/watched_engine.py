# SPDX-License-Identifier: Apache-2.0
"""The transformers engine, which also tells how many bytes of tensors a generation held at its peak, by torch's own allocator.

Its decoding thread is watched: all tensors of a generation are made there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from relax_plugin_transformers.engine import TransformersEngine

from relax_core.api import EngineSpec, GenerateRequest, Workload
from tests.benchmarks.watched import memory_profile, most_held


class WatchedEngine(TransformersEngine):
    """Start it, then ask for `peak_bytes` of requests."""

    async def peak_bytes(self, requests: Sequence[GenerateRequest]) -> int:
        """While these are generated, with the weights."""
        profile = memory_profile()
        await self._running().ask(profile.__enter__)
        async for _ in self.generate(requests):
            pass
        await self._running().ask(lambda: profile.__exit__(None, None, None))
        return self.held() + most_held(profile)

    def held(self) -> int:
        """Weights and buffers."""
        module = self._running().model.module
        storages = [tensor.untyped_storage() for tensor in (*module.parameters(), *module.buffers())]
        return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def requests_of(work: Workload, vocab: int, shorter: int = 0, stops: int = 0) -> list[GenerateRequest]:
    """Rows that become as long as they may, but for those of the first prompt, which is `shorter`. With `stops` tokens that
    end a row, most end sooner."""
    made = np.random.default_rng(0)
    prompts = [tuple(made.integers(0, vocab, work.prompt_tokens).tolist()) for _ in range(work.prompts)]
    prompts[0] = prompts[0][shorter:]
    ends = tuple(range(stops))
    return [
        GenerateRequest(f"{row}", prompts[row // work.group_size], work.new_tokens, seed=row, stop_tokens=ends)
        for row in range(work.rows)
    ]


async def tensors(
    folder: str, work: Workload, requests: Sequence[GenerateRequest], dtype: str = "float32", head_dtype: str = "",
    **options: Any,
) -> tuple[int, int]:  # fmt: skip
    """Bytes of the estimate and of the peak."""
    engine = WatchedEngine(WatchedEngine.options_model()(**options))
    model = {"path": folder, "dtype": dtype, "head_dtype": head_dtype}
    spec = EngineSpec(model=model, max_context=work.row_tokens)
    told = engine.estimate(spec, work).tensors("generate")
    await engine.start(spec)
    try:
        return told, await engine.peak_bytes(requests)
    finally:
        await engine.stop()
