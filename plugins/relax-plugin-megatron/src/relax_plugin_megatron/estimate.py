# SPDX-License-Identifier: Apache-2.0
"""Estimates of a rank's memory and work by formula, from the configuration of the model.

Activations: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", tables 2 and 3, with
attention that keeps no scores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from relax_core.api import Estimate, TrainerSpec, Workload
from relax_core.trainer_kit.model_folder import check_folder, read_json
from relax_core.trainer_kit.setup import TRAINED_ROLES, scalars
from relax_plugin_megatron.architecture import Architecture, check_parts
from relax_plugin_megatron.layout import Grid
from relax_plugin_megatron.options import MegatronOptions

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
LOGITS_AT_ONCE = 3
"""Float32 arrays of the size of the logits that scoring holds: logits, their exponentials, and a gradient."""


def estimate(
    spec: TrainerSpec, options: MegatronOptions, work: Workload, micro_batches: Sequence[int], build: Callable[..., Any]
) -> Estimate:
    """Estimate the memory by phase and the floating-point operations of one step.

    `micro_batches`: rows of each micro-batch of this rank. Raises ConfigError for a layout that can't work.
    """
    path = str(spec.model["path"])
    grid = options.grid(spec.world_size)
    grid.check()
    shape = Architecture.of(read_json(check_folder(path), "config.json"), path)
    shape.check(grid, options.sequence_parallel)
    check_parts(spec)
    scalar = bool(scalars(spec, build))
    size = BYTES[str(spec.model.get("dtype", "float32"))]
    own = shape.parameters(grid, spec.rank, scalar)
    tokens = max(micro_batches, default=0) * work.row_tokens // grid.context
    passed = sum(micro_batches) * work.row_tokens // grid.context
    logits = 0
    if grid.stage(spec.rank) == grid.pipeline - 1 and not scalar:
        whole = tokens * -(-shape.vocabulary // grid.tensor) * 4
        logits = LOGITS_AT_ONCE * min(whole, options.logits_mb << 20)
    if spec.role not in TRAINED_ROLES:
        kept = int(_layer(shape, grid, options, size) * tokens)
        return Estimate(
            {"forward": {"parameters": own * size, "activations": kept, "logits": logits}},
            {"forward": 2.0 * own * passed}, (NOTE,),
        )  # fmt: skip
    parts = {
        "parameters": own * size,
        "gradients": own * 4,
        "optimizer": own * (8 if size == 4 else 12) // grid.data,
        "activations": int(_kept(shape, grid, options, size, spec.rank, len(micro_batches)) * tokens),
        "logits": logits,
    }
    repeats = 8.0 if options.recompute == "full" else 6.0
    return Estimate({"train": parts}, {"train": repeats * own * passed}, (NOTE,))


NOTE = "megatron: activations by the formulas of Korthikanti et al. 2022; buffers of communication are left out"


def _layer(shape: Architecture, grid: Grid, options: MegatronOptions, size: int) -> float:
    """Return the bytes per token that the backward pass of one layer needs."""
    split = grid.tensor if options.sequence_parallel else 1
    mlp = shape.expert_width * shape.experts_per_token if shape.experts else shape.mlp_width
    heads = (2 * shape.heads + 2 * shape.key_value_heads) * shape.head_width
    return size * (4 * shape.hidden / split + (heads + 3 * mlp) / grid.tensor)


def _kept(shape: Architecture, grid: Grid, options: MegatronOptions, size: int, rank: int, micro_batches: int) -> float:
    """Return the bytes per token of one micro-batch that a stage keeps: the first stages hold several micro-batches."""
    layers = shape.layers // grid.pipeline
    whole = _layer(shape, grid, options, size)
    held = min(grid.pipeline - grid.stage(rank), max(1, micro_batches))
    if options.recompute == "full":
        split = grid.tensor if options.sequence_parallel else 1
        return held * layers * size * shape.hidden / split + whole
    return held * layers * whole
