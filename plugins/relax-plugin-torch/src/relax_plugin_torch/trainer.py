# SPDX-License-Identifier: Apache-2.0
"""The `torch` trainer: trains Hugging Face causal language models on one rank or several.

This module does not import torch, so that a role can plan chunks without loading it. `start` imports `rank.py`, which
does the work.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from relax_core.api import ChunkPlan, Estimate, TrainerSpec, TrainerWork, Version, Workload
from relax_core.learn import plan_micro_batches
from relax_core.trainer_kit.rank_trainer import RankTrainer
from relax_plugin_torch.options import TorchOptions

if TYPE_CHECKING:
    from relax_plugin_torch.rank import Rank

TOKENS_PER_MICRO_BATCH = 2048
"""Default size in padded tokens, before prompts are shared. On a CPU, fewer cost overhead, more overflow the caches."""


class TorchTrainer(RankTrainer["Rank", TorchOptions]):
    """A trainer of causal language models that `transformers` loads, with or without vision and audio inputs."""

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

    def make_rank(self, spec: TrainerSpec) -> Rank:
        from relax_plugin_torch.rank import Rank

        return Rank(spec, self.options, self.build)

    def begin_step(self, version: Version) -> None:
        super().begin_step(version)
        self._started.counter.take()  # earlier work, such as an evaluation's, is not the step's

    def work(self) -> TrainerWork:
        return self._started.work()

    def offload(self, parts: Sequence[str]) -> int:
        """Offload parts; return the bytes that were freed.

        On a GPU, weights and optimizer move to host memory and gradients are dropped. A CPU frees gradients only.
        """
        return self._started.offload(parts)

    def onload(self, parts: Sequence[str]) -> None:
        self._started.onload(parts)
