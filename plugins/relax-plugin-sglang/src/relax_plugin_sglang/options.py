# SPDX-License-Identifier: Apache-2.0
"""Options of the SGLang engine. Sizes are given, not guessed from free memory: several processes share a machine."""

from __future__ import annotations

from typing import Any

from pydantic import Field, PositiveInt, field_validator

from relax_core.api.options import Options

PARALLEL = frozenset({"tp_size", "pp_size", "dp_size", "ep_size", "nnodes"})
"""Arguments of SGLang that must be 1: its scheduler runs in the engine's process, and other ranks would be missing."""


class SglangOptions(Options):
    kv_cache_tokens: PositiveInt | None = None
    """Tokens that the cache of keys and values holds; absent: 32768 on a CPU, on a GPU what `gpu_memory` leaves."""
    gpu_memory: float = Field(0.85, gt=0.0, le=1.0)
    """Share of a GPU's memory for weights and cache together."""
    max_batch_rows: PositiveInt = 256
    """Requests that decode together."""
    max_prefill_tokens: PositiveInt | None = None
    """Tokens of prompts in one iteration, longer ones go in chunks of so many; absent: SGLang's choice."""
    prefix_cache: bool = True
    """Prompts that begin alike share keys and values; never over an update of the weights."""
    keep_weights: bool = False
    """Keep a copy of the weights in host memory, as large as the model, to put deltas on (`weights.payload = "delta"`)."""
    attention: str | None = None
    """SGLang's name of an attention backend; absent: `torch_native` on a CPU, on a GPU SGLang's choice."""
    graphs: bool = True
    """CUDA graphs, on a GPU; a CPU runs eagerly."""
    server_args: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of SGLang's `ServerArgs`, as they are called there."""

    @field_validator("server_args")
    @classmethod
    def _one_gpu(cls, given: dict[str, Any]) -> dict[str, Any]:
        if several := sorted(name for name in PARALLEL & given.keys() if given[name] != 1):
            fix = "this engine works on one GPU; start more of them (placement.rollout.engines), or use vllm"
            raise ValueError(f"{', '.join(several)}: {fix}")
        return given
