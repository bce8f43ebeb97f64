# SPDX-License-Identifier: Apache-2.0
"""Options of the vLLM engine. Sizes are given, not guessed from free memory: several processes share a machine."""

from __future__ import annotations

from typing import Any

from pydantic import Field, PositiveInt

from relax_core.api.options import Options


class VllmOptions(Options):
    tensor_parallel: PositiveInt = 1
    """GPUs that share each layer."""
    pipeline_parallel: PositiveInt = 1
    """GPUs that share the layers among them."""
    expert_parallel: bool = False
    """Experts of a mixture are spread over the tensor-parallel GPUs whole."""
    kv_cache_mb: PositiveInt | None = None
    """Memory for keys and values; absent: 256 MB on a CPU, on a GPU what `gpu_memory` leaves."""
    gpu_memory: float = Field(0.9, gt=0.0, le=1.0)
    """Share of a GPU's memory that the engine may take."""
    max_batch_rows: PositiveInt = 256
    """Requests that decode together."""
    max_batch_tokens: PositiveInt | None = None
    """Tokens of one iteration, prompts included; absent: vLLM's choice. On a CPU no less than the context."""
    prefix_cache: bool = True
    """Prompts that begin alike share keys and values; never over an update of the weights."""
    keep_weights: bool = False
    """Keep a copy of the weights in host memory, as large as the model, to put deltas on (`weights.payload = "delta"`)."""
    graphs: bool = True
    """CUDA graphs and compilation, on a GPU; a CPU runs eagerly."""
    engine_args: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of vLLM's `EngineArgs`, as they are called there."""
