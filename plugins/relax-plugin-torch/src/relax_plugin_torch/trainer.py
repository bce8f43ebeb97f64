# SPDX-License-Identifier: Apache-2.0
"""The `torch` trainer: trains Hugging Face causal language models on one rank or several.

This module does not import torch, so that a role can plan chunks without loading it. `start` imports `rank.py`, which
does the work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from relax_core.api import (
    Chosen,
    Chunk,
    ChunkPlan,
    Estimate,
    Manifest,
    RowBatch,
    Trainer,
    TrainerSpec,
    UpdateResult,
    Version,
    Workload,
)
from relax_core.api.weights import Payload
from relax_core.learn import plan_micro_batches
from relax_plugin_torch.options import TorchOptions

if TYPE_CHECKING:
    from relax_plugin_torch.rank import Rank

TOKENS_PER_MICRO_BATCH = 2048
"""Default size in padded tokens, before prompts are shared. On a CPU, fewer cost overhead, more overflow the caches."""


class TorchTrainer(Trainer[TorchOptions]):
    """A trainer of causal language models that `transformers` loads, with or without vision and audio inputs."""

    dtypes: ClassVar[tuple[str, ...]] = ("float32", "bfloat16", "float16")
    float32_head: ClassVar[bool] = True
    replays_routing: ClassVar[bool] = True
    preload: ClassVar[tuple[str, ...]] = (
        "relax_plugin_torch.rank", "transformers.modeling_utils", "transformers.masking_utils",
    )  # fmt: skip
    _rank: Rank | None = None

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

    def start(self, spec: TrainerSpec) -> Mapping[str, Any]:
        from relax_plugin_torch.rank import Rank

        self._rank = Rank(spec, self.options, self.build)
        return self._rank.facts()

    def begin_step(self, version: Version) -> None:
        self._started.progress.begin(version)

    def begin_update(self, denominators: Mapping[str, float]) -> None:
        self._started.begin_update(denominators)

    def accumulate(self, chunk: Chunk, last: bool) -> None:
        self._started.accumulate(chunk)

    def finish_update(self, denominators: Mapping[str, float]) -> UpdateResult:
        return self._started.finish_update(denominators)

    def abort_update(self) -> None:
        self._started.abort_update()

    def forward(self, chunk: Chunk, columns: Sequence[str]) -> RowBatch:
        return self._started.forward(chunk, columns)

    def publish(
        self, version: Version, transport: Chosen, location: str, payload: Payload = "full", base: str = ""
    ) -> Manifest:
        return self._started.publish(version, transport, location, payload, base)

    def transfer(self, manifest: Manifest, transport: Chosen, receivers: int, wait_s: float) -> int:
        return self._started.transfer(manifest, transport, receivers, wait_s)

    def load_published(self, manifest: Manifest, transport: Chosen) -> None:
        self._started.load_published(manifest, transport)

    def save(self, directory: str) -> None:
        self._started.save(directory)

    def snapshot(self, directory: str) -> None:
        self._started.snapshot(directory)

    async def saved(self) -> None:
        await self._started.saved()

    def load(self, directory: str) -> None:
        self._started.load(directory)

    def export(self, directory: str) -> None:
        self._started.export(directory)

    def offload(self, parts: Sequence[str]) -> int:
        """Offload parts; return the bytes that were freed.

        On a GPU, weights and optimizer move to host memory and gradients are dropped. A CPU frees gradients only.
        """
        return self._started.offload(parts)

    def onload(self, parts: Sequence[str]) -> None:
        self._started.onload(parts)

    def stop(self) -> None:
        if self._rank is not None:
            self._rank.stop()
            self._rank = None

    @property
    def _started(self) -> Rank:
        if self._rank is None:
            raise RuntimeError("the trainer was not started; call start first")
        return self._rank
