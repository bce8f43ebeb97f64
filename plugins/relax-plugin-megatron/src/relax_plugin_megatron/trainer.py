# SPDX-License-Identifier: Apache-2.0
"""The `megatron` trainer: trains decoders with megatron-core's tensor, pipeline, expert and data parallelism.

This module imports neither torch nor megatron-core, so that a role can plan chunks without loading them.
"""

from __future__ import annotations

import gc
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
from relax_plugin_megatron.options import MegatronOptions

if TYPE_CHECKING:
    from relax_plugin_megatron.rank import Rank

TOKENS_PER_MICRO_BATCH = 8192
"""Default size of a micro-batch in padded tokens."""


class MegatronTrainer(Trainer[MegatronOptions]):
    """A trainer of Llama, Qwen2, Qwen3, Qwen3-MoE and Mixtral models on one rank or many."""

    dtypes: ClassVar[tuple[str, ...]] = ("float32", "bfloat16", "float16")
    float32_head: ClassVar[bool] = True
    replays_routing: ClassVar[bool] = True
    preload: ClassVar[tuple[str, ...]] = ("relax_plugin_megatron.rank",)
    _rank: Rank | None = None

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

    def start(self, spec: TrainerSpec) -> Mapping[str, Any]:
        from relax_plugin_megatron.rank import Rank

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

    def stop(self) -> None:
        if self._rank is not None:
            self._rank.stop()
            self._rank = None
            gc.collect()  # Megatron's modules form cycles; the threads of a process group end when it is freed

    @property
    def _started(self) -> Rank:
        if self._rank is None:
            raise RuntimeError("the trainer was not started; call start first")
        return self._rank
