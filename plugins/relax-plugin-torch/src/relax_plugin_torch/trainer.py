# SPDX-License-Identifier: Apache-2.0
"""The `torch` trainer: Hugging Face causal language models, as one of any number of ranks.

This module is light: a shell plans chunks with it and never loads torch. What works is in `rank.py`, loaded at start.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from relax_core.api import (
    Chosen,
    Chunk,
    ChunkPlan,
    Estimate,
    Manifest,
    Options,
    RowBatch,
    Trainer,
    TrainerSpec,
    UpdateResult,
    Version,
    Workload,
)
from relax_core.api.weights import Payload
from relax_core.learn import plan_micro_batches

if TYPE_CHECKING:
    from relax_plugin_torch.rank import Rank

TOKENS_PER_MICRO_BATCH = 2048
"""Padded, before prompts are shared. Measured on CPU: smaller ones pay Python's overhead, larger ones leave the caches."""


class TorchOptions(Options):
    """Settings of the trainer's work; what defines the experiment is in the core tables."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model lives; `auto` is the first GPU, or the CPU where there is none."""
    attention: Literal["auto", "sdpa", "eager", "flash_attention_2"] = "auto"
    """Implementation of attention, by its name in transformers. `auto` is flash-attn on rows in one line where a GPU, a
    format of 16 bits and the package allow it, else `sdpa`."""
    compile: bool = False
    """torch.compile of the model's blocks: it pays in long runs of small models or short rows, and costs a minute or more
    before the first step, on a CPU several; it needs a C++ compiler there."""
    activation_checkpointing: bool = False
    """Keep of each block only what goes into it, and compute the rest again for the backward pass: the same results bit for
    bit in less memory, at about a third more work."""
    share_prefixes: bool = True
    """Compute a prompt that rows of a group have in common once, where that costs less than computing it for each."""
    sharding: Literal["auto", "none", "fsdp"] = "auto"
    """Of several ranks: `none` keeps a copy on each, `fsdp` a share of weights and optimizer; `auto` is `fsdp` where copies
    would take half of a GPU."""
    tensor_parallel: int = Field(1, ge=1)
    """Ranks that compute the same rows together, each a part of every matrix that the model's own plan cuts; it must divide
    the ranks. For models whose layers are too large for one GPU."""
    collective_timeout_s: float = Field(600.0, gt=0)
    """Longest time that ranks wait for each other within one call."""
    optimizer: Literal["adamw", "adamw-8bit", "adafactor", "sgd"] = "adamw"
    """What applies the `[optimizer]` table: `adamw`; `adamw-8bit`, its moments in blocks of 8 bits (needs torchao);
    `adafactor`, sums of rows and columns in place of moments, without `betas`; `sgd`, the first of `betas` its momentum."""
    offload_optimizer: bool = False
    """Keep the optimizer's state in pinned host memory and bring it to the GPU for each update alone: room for activations
    of its size, for a copy there and back."""
    loss_scale: float = Field(65536.0, ge=1.0)
    """float16: what losses are multiplied by at first, so that small gradients are not rounded to 0; an overflow halves it."""
    loss_scale_window: int = Field(200, ge=1)
    """float16: updates without overflow until the scale is doubled."""
    logits_mb: int = Field(128, gt=0)
    """Most memory of float32 logits at once; the backward pass computes larger ones again, slice by slice."""


class TorchTrainer(Trainer[TorchOptions]):
    """Trains what `transformers.AutoModelForCausalLM` loads."""

    dtypes: ClassVar[tuple[str, ...]] = ("float32", "bfloat16", "float16")
    replays_routes: ClassVar[bool] = True
    preload: ClassVar[tuple[str, ...]] = (
        "relax_plugin_torch.rank", "transformers.modeling_utils", "transformers.masking_utils",
    )  # fmt: skip
    _rank: Rank | None = None

    def plan(self, lengths: Sequence[int], world_size: int, tokens_per_micro_batch: int = 0) -> ChunkPlan:
        """Ranks of a tensor-parallel group compute the same rows."""
        group_size = self.options.tensor_parallel
        if world_size % group_size:
            return plan_micro_batches(lengths, world_size, tokens_per_micro_batch or TOKENS_PER_MICRO_BATCH)
        shared = plan_micro_batches(lengths, world_size // group_size, tokens_per_micro_batch or TOKENS_PER_MICRO_BATCH)
        return ChunkPlan(tuple(part for part in shared.micro_batches for _ in range(group_size)))

    def estimate(self, spec: TrainerSpec, work: Workload) -> Estimate:
        from relax_plugin_torch.estimate import estimate
        from relax_plugin_torch.head import scalars
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

    def sleep(self, parts: Sequence[str]) -> int:
        """Bytes that others can have now: on a GPU all parts move to the host; on a CPU only gradients are freed."""
        return self._started.sleep(parts)

    def wake(self, parts: Sequence[str]) -> None:
        self._started.wake(parts)

    def stop(self) -> None:
        if self._rank is not None:
            self._rank.stop()
            self._rank = None

    @property
    def _started(self) -> Rank:
        if self._rank is None:
            raise RuntimeError("the trainer was not started; call start first")
        return self._rank
