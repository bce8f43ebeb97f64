# SPDX-License-Identifier: Apache-2.0
"""The `megatron` trainer: trains decoders with megatron-core's tensor, pipeline, expert and data parallelism.

This module imports neither torch nor megatron-core, so that a role can plan chunks without loading them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

from relax_core.api import ChunkPlan, Estimate, Layout, TrainerSpec, Workload
from relax_core.learn import plan_micro_batches
from relax_core.trainer_kit.rank_trainer import RankTrainer
from relax_plugin_megatron.options import MegatronOptions

TOKENS_PER_MICRO_BATCH = 8192
"""Default size of a micro-batch in padded tokens."""


class MegatronTrainer(RankTrainer[MegatronOptions]):
    """A trainer of Llama, Qwen2, Qwen3, Qwen3-MoE and Mixtral models on one rank or many."""

    rank_class: ClassVar[str] = "relax_plugin_megatron.rank:Rank"
    dtypes: ClassVar[tuple[str, ...]] = ("float32", "bfloat16", "float16")
    float32_head: ClassVar[bool] = True
    replays_routing: ClassVar[bool] = True
    preload: ClassVar[tuple[str, ...]] = ("relax_plugin_megatron.rank",)

    def plan(self, lengths: Sequence[int], world_size: int, tokens_per_micro_batch: int = 0) -> ChunkPlan:
        """Split rows into micro-batches; ranks that compute together get the same rows."""
        grid = self.options.grid(world_size)
        budget = tokens_per_micro_batch or TOKENS_PER_MICRO_BATCH
        if not grid.fits:
            return plan_micro_batches(lengths, world_size, budget)
        shared = plan_micro_batches(lengths, grid.data, budget)
        return ChunkPlan(tuple(shared.micro_batches[grid.data_index(rank)] for rank in range(world_size)))

    def estimate(self, spec: TrainerSpec, work: Workload) -> Estimate:
        from relax_plugin_megatron.estimate import estimate

        plan = self.plan([work.row_tokens] * work.rows, spec.world_size, spec.tokens_per_micro_batch)
        return estimate(spec, self.options, work, [len(rows) for rows in plan.micro_batches[spec.rank]], self.build)

    def layouts(self, spec: TrainerSpec, work: Workload) -> Iterable[Layout]:
        from relax_plugin_megatron.estimate import layouts

        return layouts(spec, work)
