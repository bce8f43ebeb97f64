# SPDX-License-Identifier: Apache-2.0
"""Options of the `torch` trainer. This module does not import torch, so that reading a configuration stays fast."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from relax_core.api import Options

Attention = Literal["auto", "sdpa", "eager", "flash_attention_2"]
OptimizerKind = Literal["adamw", "adamw-8bit", "adafactor", "sgd"]


class TorchOptions(Options):
    """Settings of how the trainer computes; settings that define the experiment are in the core tables."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the model. `auto` is a GPU (a different one for each rank) if torch sees any, else the CPU."""
    attention: Attention = "auto"
    """Attention implementation, by its name in transformers. `auto` is flash-attn, which needs no padding, on a GPU with
    the package, a 16-bit `model.dtype` and `deterministic = false`; else `sdpa`, or `eager` if the architecture has no
    other, as Gemma 2 and gpt-oss."""
    compile: bool = False
    """Compile the model's blocks with torch.compile. This pays in long runs of small models or short rows. It delays
    the first step by a minute or more, on a CPU by several minutes, and needs a C++ compiler there."""
    activation_checkpointing: bool = False
    """Keep only the inputs of each block, and compute the rest again in the backward pass. Results are the same bit
    for bit; memory shrinks, and computation grows by about a third."""
    share_prefixes: bool = True
    """Compute a prompt once for all rows of a group that share it, if this is cheaper than once for each row."""
    sharding: Literal["auto", "none", "fsdp"] = "auto"
    """Weights on several ranks. `none`: each rank has a copy. `fsdp`: each rank holds a shard of weights, gradients and
    optimizer state. `auto`: `fsdp` if copies would take more than half of a GPU's memory, else `none`."""
    tensor_parallel: int = Field(1, ge=1)
    """Number of ranks that compute the same rows together, each with a part of every matrix that the model's own plan
    splits. It must divide the number of ranks. For models whose layers are too large for one GPU."""
    collective_timeout_s: float = Field(600.0, gt=0)
    """Seconds that a rank waits for the slowest rank within one call before the call fails."""
    optimizer: OptimizerKind = "adamw"
    """Optimizer that applies the `[optimizer]` table. `adamw-8bit` keeps its moments in 8-bit blocks (needs torchao).
    `adafactor` keeps sums of rows and columns instead of moments, and needs the default `betas`, which have no effect.
    The first of `betas` is the momentum of `sgd`. `optimizer.lr` is the step of `adamw` in each weight, but `adafactor`
    multiplies it by the root mean square of the tensor's weights, or by 0.001 if that is larger: steps are 50 times
    smaller for a typical matrix, and 1000 times smaller for a tensor of zeros, such as LoRA's B or a new head. Set a
    larger `lr` there. `sgd` multiplies `lr` by the gradient itself."""
    offload_optimizer: bool = False
    """Keep the optimizer's state in pinned host memory, and copy it to the GPU only for updates and checkpoints. This
    frees GPU memory for activations, and costs a copy in each direction."""
    loss_scale: float = Field(65536.0, ge=1.0)
    """Initial factor on losses in float16, which keeps small gradients from rounding to 0; each overflow halves it."""
    loss_scale_window: int = Field(200, ge=1)
    """Number of float16 updates without an overflow after which the loss scale is doubled."""
    peak_tflops: float = Field(0.0, ge=0)
    """Peak rate of one device in `model.dtype`, in 10^12 operations per second, for the metric `trainer/mfu`. 0 looks the
    GPU up in a table of data sheets, which has 16-bit formats only; without a peak, the metric is left out."""
    logits_mb: int = Field(128, gt=0)
    """Upper limit in MiB of float32 logits in memory at once. Larger logits are computed in slices, and once more in
    the backward pass."""
