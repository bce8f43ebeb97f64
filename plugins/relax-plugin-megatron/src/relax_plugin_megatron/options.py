# SPDX-License-Identifier: Apache-2.0
"""Options of the `megatron` trainer. This module does not import torch, so that reading a configuration stays fast."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from relax_core.api import Options
from relax_plugin_megatron.layout import Grid


class MegatronOptions(Options):
    """The layout of the model over the ranks, and settings of the computation; the experiment is in the core tables."""

    tensor_parallel: int = Field(1, ge=1)
    """Number of ranks that split every matrix. It must divide the ranks, the attention heads and the key-value heads."""
    sequence_parallel: bool = False
    """Split norms and activations between blocks along the tokens of a row over the tensor-parallel ranks."""
    pipeline_parallel: int = Field(1, ge=1)
    """Number of stages with consecutive layers; micro-batches pass through them one forward, one backward (1F1B)."""
    virtual_pipeline: int = Field(1, ge=1)
    """Number of chunks of consecutive layers that each stage holds (interleaved 1F1B). More chunks shorten the idle time
    of stages, and send activations as many times as often. The product with `pipeline_parallel` must divide the layers."""
    context_parallel: int = Field(1, ge=1)
    """Number of ranks that split the tokens of every row; each gathers the keys and values of all. For long rows."""
    expert_parallel: int = Field(1, ge=1)
    """Number of ranks over which the experts of a mixture-of-experts layer are spread."""
    expert_tensor_parallel: int = Field(1, ge=1)
    """Number of ranks that split the matrices of each expert."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations to compute again in the backward pass: `selective` those of attention, `full` those of whole layers.
    Results are the same; memory shrinks, and `full` costs about a third more computation."""
    offload_optimizer: bool = False
    """Keep the optimizer's state in pinned host memory, and copy it to the GPU only for updates and checkpoints. This
    frees GPU memory for activations, and costs a copy in each direction."""
    logits_mb: int = Field(128, ge=1)
    """Largest size, in MiB, of the float32 logits that exist at once on a rank."""
    collective_timeout_s: float = Field(600.0, gt=0)
    """Seconds that a rank waits for the slowest rank within one call before the call fails."""
    loss_scale: float = Field(65536.0, ge=1.0)
    """First loss scale of `model.dtype = "float16"`."""
    loss_scale_window: int = Field(1000, ge=1)
    """Updates without an overflow until the loss scale is doubled."""

    def grid(self, world: int) -> Grid:
        """Return the grid of `world` ranks."""
        return Grid(
            world,
            self.tensor_parallel,
            self.pipeline_parallel,
            self.context_parallel,
            self.expert_parallel,
            self.expert_tensor_parallel,
            self.virtual_pipeline,
        )
