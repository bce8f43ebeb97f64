# SPDX-License-Identifier: Apache-2.0
"""The `torch` trainer: trains Hugging Face causal language models on one rank or several.

This module does not import torch, so that a role can plan chunks without loading it. `start` returns the rank of
`rank.py`, which does the work.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from relax_core.api import ChunkPlan, Estimate, TrainerSpec, Workload
from relax_core.learn import plan_micro_batches
from relax_core.trainer_kit.rank_trainer import RankTrainer
from relax_plugin_torch.options import TorchOptions

TOKENS_PER_MICRO_BATCH = 2048
"""Default size in padded tokens, before prompts are shared. On a CPU, fewer cost overhead, more overflow the caches."""


class TorchTrainer(RankTrainer[TorchOptions]):
    """A trainer of causal language models that `transformers` loads, with or without vision and audio inputs."""

    rank_class: ClassVar[str] = "relax_plugin_torch.rank:Rank"
    dtypes: ClassVar[tuple[str, ...]] = ("float32", "bfloat16", "float16")
    float32_head: ClassVar[bool] = True
    replays_routing: ClassVar[bool] = True
    preload: ClassVar[tuple[str, ...]] = (
        "relax_plugin_torch.rank", "transformers.modeling_utils", "transformers.masking_utils",
    )  # fmt: skip

    def check_start(self, here: bool = True) -> None:
        from relax_core.trainer_kit.setup import choose_device

        super().check_start(here)
        if here:
            choose_device(self.options.device)

    def plan(self, lengths: Sequence[int], world_size: int, tokens_per_micro_batch: int = 0) -> ChunkPlan:
        """Split rows into micro-batches; all ranks of a tensor-parallel group get the same rows."""
        group_size = self.options.tensor_parallel
        if world_size % group_size:
            return plan_micro_batches(lengths, world_size, tokens_per_micro_batch or TOKENS_PER_MICRO_BATCH)
        shared = plan_micro_batches(lengths, world_size // group_size, tokens_per_micro_batch or TOKENS_PER_MICRO_BATCH)
        return ChunkPlan(tuple(part for part in shared.micro_batches for _ in range(group_size)))

    def estimate(self, spec: TrainerSpec, work: Workload) -> Estimate:
        from relax_core.trainer_kit.setup import scalars
        from relax_plugin_torch.estimate import estimate
        from relax_plugin_torch.tensor_parallel import check_divides

        check_divides(spec.world_size, self.options.tensor_parallel)
        plan = self.plan([work.row_tokens] * work.rows, spec.world_size, spec.tokens_per_micro_batch)
        return estimate(spec, self.options, work, plan.micro_batches[spec.rank], scalars(spec, self.build))
