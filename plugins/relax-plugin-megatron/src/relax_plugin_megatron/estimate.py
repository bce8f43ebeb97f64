# SPDX-License-Identifier: Apache-2.0
"""Estimates of a rank's memory, work and communication by formula, and the layouts that are worth comparing by them.

Activations: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", tables 2 and 3, with
attention that keeps no scores. Idle time of a pipeline: Narayanan et al. 2021, "Efficient Large-Scale Language Model
Training on GPU Clusters Using Megatron-LM", section 2.2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from relax_core.api import ConfigError, Estimate, Layout, TrainerSpec, Workload
from relax_core.trainer_kit.model_folder import check_folder, read_json
from relax_core.trainer_kit.setup import TRAINED_ROLES, scalars
from relax_plugin_megatron.architecture import Architecture, Sizes
from relax_plugin_megatron.freezing import frozen, trained as without_frozen
from relax_plugin_megatron.layout import Grid
from relax_plugin_megatron.lora import Lora
from relax_plugin_megatron.options import MegatronOptions

ADAPTER_BYTES = 4
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
LOGITS_AT_ONCE = 3
"""Float32 arrays of the size of the logits that scoring holds: logits, their exponentials, and a gradient."""
MOST_TOKENS = 1 << 17
"""Largest micro-batch, in tokens, of a layout to compare; a single row may be longer."""
ENCODERS = "megatron: activations and work of the vision and audio encoders are left out; their parameters are not"
NOTE = "megatron: activations by the formulas of Korthikanti et al. 2022; buffers of communication are left out"


def estimate(
    spec: TrainerSpec, options: MegatronOptions, work: Workload, micro_batches: Sequence[int], build: Callable[..., Any]
) -> Estimate:
    """Estimate the memory by phase, the floating-point operations and the communication of one step.

    `micro_batches`: rows of each micro-batch of this rank. Raises ConfigError for a layout that can't work.
    """
    grid, shape = options.grid(spec.world_size), architecture(spec)
    grid.check()
    shape.check(grid, options.sequence_parallel)
    scalar = bool(scalars(spec, build))
    held = frozen(spec, shape, scalar)
    lora = Lora.of(spec, shape, held)
    size = BYTES[str(spec.model.get("dtype", "float32"))]
    sizes = shape.sizes(grid, spec.rank, scalar)
    adapters = lora.size(grid, spec.rank, shape.layers) if lora is not None else 0
    head = shape.hidden if scalar and grid.stage(spec.rank) == grid.pipeline - 1 else 0
    trained = without_frozen(shape, grid, spec.rank, sizes, scalar, held)
    if lora is not None:
        trained = replace(sizes, dense=adapters + head, experts=0)
    own = sizes.all * size + adapters * ADAPTER_BYTES
    tokens = max(micro_batches, default=0) * work.row_tokens // grid.context
    passed = sum(micro_batches) * work.row_tokens // grid.context
    trains = spec.role in TRAINED_ROLES
    again = trains and options.recompute == "full"
    phase = "train" if trains else "forward"
    logits = 0
    if grid.stage(spec.rank) == grid.pipeline - 1 and not scalar:
        whole = tokens * -(-shape.vocabulary // grid.tensor) * 4
        logits = LOGITS_AT_ONCE * min(whole, options.logits_mb << 20)
    parts = {"parameters": own, "logits": logits}
    moved = float(own * len(micro_batches))
    if trains:
        moments = 8 if size == 4 or lora is not None else 12
        state = _share(trained, grid)
        parts |= {
            "gradients": trained.all * 4,
            "optimizer": int(state * moments),
            "activations": int(_kept(shape, grid, options, size, spec.rank, len(micro_batches)) * tokens),
        }
        moved += (own * (1 + again) + trained.all * 8) * len(micro_batches) + state * 2 * moments
    else:
        parts["activations"] = int(_layer(shape, grid, options, size) * tokens)
    phases = {phase: parts}
    if trains and options.offload_optimizer:  # the state is on the device only for the optimizer's step
        meanwhile = ("parameters", "gradients", "optimizer")
        phases = {phase: {**parts, "optimizer": 0}, "update": {name: parts[name] for name in meanwhile}}
    notes, gradients = [ENCODERS] if shape.encoders else [], 0.0
    forward = 2.0 * (1 + again + trains)  # each matrix again for the gradient of its inputs
    if trains:  # and for the gradient of its own
        gradients = 2.0 * (trained.multiplied if lora is None else adapters)
    if trains and (lora is not None or held):
        one = Grid(1)
        whole = shape.sizes(one, 0, scalar)
        added = lora.size(one, 0, shape.layers) if lora is not None else 0
        everything = whole.all + added
        if lora is None:
            some = without_frozen(shape, one, 0, whole, scalar, held).all
        else:
            some = added + (shape.hidden if scalar else 0)
        notes.append(f"trains {some:,} of {everything:,} parameters ({100 * some / everything:.2g} %)")
    return Estimate(
        phases,
        {phase: (forward * (sizes.multiplied + adapters) + gradients) * passed},
        (NOTE, *notes),
        {phase: moved},
        {phase: _sent(shape, grid, options, trained, spec.rank, passed, size, trains, again)},
        {phase: (grid.pipeline - 1) / (grid.virtual * max(1, len(micro_batches)) + grid.pipeline - 1)},
    )


def architecture(spec: TrainerSpec) -> Architecture:
    """Read the architecture of the model. Raises ConfigError for a model that this trainer does not know."""
    path = str(spec.model["path"])
    return Architecture.of(read_json(check_folder(path), "config.json"), path)


def _layer(shape: Architecture, grid: Grid, options: MegatronOptions, size: int) -> float:
    """Return the bytes per token that the backward pass of one layer needs."""
    split = grid.tensor if options.sequence_parallel else 1
    mlp = shape.expert_width * shape.experts_per_token if shape.experts else shape.mlp_width
    heads = (2 * shape.heads + 2 * shape.key_value_heads) * shape.head_width
    return size * (4 * shape.hidden / split + (heads + 3 * mlp) / grid.tensor)


def _kept(shape: Architecture, grid: Grid, options: MegatronOptions, size: int, rank: int, micro_batches: int) -> float:
    """Return the bytes per token of one micro-batch that a stage keeps: the first stages hold several micro-batches.

    With chunks, a stage runs ahead by rounds of all stages, and holds a micro-batch once for each chunk that it passed.
    """
    layers = shape.layers // (grid.pipeline * grid.virtual)
    whole = _layer(shape, grid, options, size)
    after = grid.pipeline - 1 - grid.stage(rank)
    ahead = after if grid.virtual == 1 else 2 * after + (grid.virtual - 1) * grid.pipeline
    held = min(ahead + 1, grid.virtual * max(1, micro_batches))
    if options.recompute == "full":
        split = grid.tensor if options.sequence_parallel else 1
        return held * layers * size * shape.hidden / split + whole
    return held * layers * whole


def _share(sizes: Sizes, grid: Grid) -> float:
    """Return the number of parameters whose moments a rank holds: ranks with the same parameters share them."""
    return sizes.dense / (grid.data * grid.context) + sizes.experts / grid.expert_data


def _sent(
    shape: Architecture, grid: Grid, options: MegatronOptions, trained: Sizes, rank: int, tokens: int, size: int,
    trains: bool, again: bool,
) -> float:  # fmt: skip
    """Return the bytes that a rank sends in one step, in rings, for the `tokens` that it computes.

    `trained`: parameters of which it sends gradients. `again`: the backward pass computes layers once more.
    """
    layers = shape.layers // grid.pipeline
    passes = 1 + trains + again
    hidden = tokens * shape.hidden * size
    split = grid.tensor if options.sequence_parallel else 1

    def others(ranks: int) -> float:
        return (ranks - 1) / ranks

    # Two sums of hidden states in a layer, each a reduce-scatter and an all-gather.
    sent = passes * layers * 4 * hidden * others(grid.tensor)
    if trains and split > 1:  # sequence parallelism gathers the inputs of matrices again for their gradients
        sent += layers * 2 * hidden * others(grid.tensor)
    kept = 2 * tokens * shape.key_value_heads * shape.head_width // grid.tensor * size
    sent += passes * layers * kept * (grid.context - 1)
    exchanged = hidden / split * shape.experts_per_token
    sent += passes * trained.mixtures * 2 * exchanged * others(grid.expert)
    stage = grid.stage(rank)
    borders = grid.virtual - (stage == grid.pipeline - 1) + trains * (grid.virtual - (stage == 0))
    sent += borders * hidden / split
    if trains:  # gradients in float32 are summed by parts, and the new weights are gathered
        copies = ((trained.dense, grid.data * grid.context), (trained.experts, grid.expert_data))
        sent += sum(parameters * (4 + size) * others(ranks) for parameters, ranks in copies)
    return sent


# -- layouts ----------------------------------------------------------------------------------------------------------


def layouts(spec: TrainerSpec, work: Workload) -> Iterator[Layout]:
    """Yield every grid of `spec.world_size` ranks; one that can work with each micro-batch and with recomputation.

    Tensor parallelism goes with sequence parallelism, which saves memory and sends the same bytes. `selective`
    recomputation is left out: attention keeps no scores, so it saves nothing. Stages have one chunk of layers each.
    """
    shape = architecture(spec)
    sizes = [size for size in range(1, spec.world_size + 1) if spec.world_size % size == 0]
    for tensor, pipeline, context, expert in product(sizes, sizes, sizes, sizes if shape.experts else (1,)):
        if spec.world_size % (tensor * pipeline * context):
            continue
        options: dict[str, int | str | bool] = {
            "tensor_parallel": tensor, "sequence_parallel": tensor > 1, "pipeline_parallel": pipeline,
            "virtual_pipeline": 1, "context_parallel": context, "expert_parallel": expert, "expert_tensor_parallel": 1,
        }  # fmt: skip
        grid = Grid(spec.world_size, tensor, pipeline, context, expert)
        shared = (grid.data, grid.data * context)
        try:
            grid.check()
            shape.check(grid, sequence_parallel=tensor > 1)
        except ConfigError:
            yield Layout(options, work.row_tokens, *shared)
            continue
        most, rows = -(-work.rows // grid.data), 1
        while rows == 1 or (rows < 2 * most and rows * work.row_tokens <= MOST_TOKENS):
            for recompute in ("none", "full"):
                yield Layout({**options, "recompute": recompute}, min(rows, most) * work.row_tokens, *shared)
            rows *= 2
