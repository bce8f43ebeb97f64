# SPDX-License-Identifier: Apache-2.0
"""Options of the vLLM engine. Sizes are given, not guessed from free memory: several processes share a machine."""

from __future__ import annotations

from typing import Any

from pydantic import Field, PositiveInt, model_validator

from relax_core.api.options import Options

OWN = frozenset({"tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "enable_expert_parallel"})


class VllmOptions(Options):
    tensor_parallel: PositiveInt = 1
    """GPUs that share each layer; they divide the heads of attention."""
    pipeline_parallel: PositiveInt = 1
    """GPUs that share the layers among them."""
    expert_parallel: bool = False
    """Experts of a mixture are spread over the tensor-parallel GPUs whole. Several copies of the model side by side (data
    parallel) are several engines: `placement.rollout.engines`."""
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

    @model_validator(mode="after")
    def _parallel(self) -> VllmOptions:
        if self.expert_parallel and self.tensor_parallel == 1:
            raise ValueError(
                "expert_parallel spreads experts over the tensor_parallel GPUs: set tensor_parallel to 2 or more"
            )
        if given := sorted(OWN & self.engine_args.keys()):
            raise ValueError(
                f"engine_args: {', '.join(given)} of vLLM has an option of its own here, or placement.rollout"
            )
        return self
