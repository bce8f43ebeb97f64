# SPDX-License-Identifier: Apache-2.0
"""Trainers: one instance a rank, in a worker process. The shell plans chunks; ranks never claim.

A step holds one or more updates: begin_update -> accumulate* -> finish_update, or abort_update.
Order at the end: all-reduce, unscale, rescale, norm, clip, update.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, Generic

from relax_core.api.batch import RowBatch
from relax_core.api.component import Chosen, Configurable, OptionsT
from relax_core.api.plan import Estimate, Workload
from relax_core.api.weights import Manifest, Payload, Version


@dataclass(frozen=True, slots=True)
class OptimizerSpec:
    """The experiment's optimizer: core configuration, equal for every trainer."""

    lr: float
    schedule: str = "constant"
    warmup_steps: int = 0
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    grad_clip: float = 1.0
    total_steps: int = 0


@dataclass(frozen=True, slots=True)
class TrainerSpec:
    """The settings that every rank of a trainer is started with."""

    model: Mapping[str, Any]
    """The `[model]` table: path, dtype, lora, freeze, ..."""
    algorithm: Chosen
    optimizer: OptimizerSpec
    role: str = "actor"
    """actor, critic, reference, actor_fwd, teacher: forward-only roles never see begin_update."""
    seed: int = 0
    deterministic: bool = False
    max_staleness: int = 0
    tokens_per_micro_batch: int = 0
    """0: the trainer's own choice."""
    rank: int = 0
    world_size: int = 1
    rendezvous: str = ""
    """`host:port` for torch.distributed where world_size > 1."""
    temperature: float = 1.0
    """Log-probs are of logits / temperature, as sampled."""
    media: str = ""
    """Directory of the run's media store (`relax_core.media.store`); empty: the run has no media."""
    suppress_tokens: tuple[int, ...] = ()
    """Ids that are never sampled: log-probs are of the distribution without them."""
    publish_dtype: str = ""
    """Number format of the weights that it publishes; empty: that of `model`."""


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """Split of a chunk: `micro_batches[rank]` lists row indices of each micro-batch. Planned once, in the shell."""

    micro_batches: tuple[tuple[tuple[int, ...], ...], ...]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows and their plan, as sent to the ranks."""

    rows: RowBatch
    plan: ChunkPlan
    skipped: int = 0
    """Rows left out because they have no gradient; they count in the denominators."""


class UpdateOutcome(StrEnum):
    APPLIED = "applied"
    OVERFLOW = "overflow"
    """fp16: the shell replays the chunks at a lower scale."""
    NOT_FINITE = "not_finite"


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """The end of one update; metrics are (sum, count) over all ranks, as `Loss.metrics`."""

    outcome: UpdateOutcome
    metrics: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    grad_norm: float = 0.0
    lr: float = 0.0


class Trainer(Configurable[OptionsT], Generic[OptionsT]):
    """A training backend, as one rank of it."""

    kind: ClassVar[str] = "trainer"
    streams: ClassVar[bool] = True
    """Whether accumulate may run before all chunks of the update are known."""
    pipelined: ClassVar[bool] = False
    """Whether a chunk's micro-batches must be handed over together (pipeline schedules)."""
    replays_routes: ClassVar[bool] = False
    """Whether rows that have `routed_experts` visit those experts, and `forward` gives `routed_experts` of its own."""
    dtypes: ClassVar[tuple[str, ...]] = ("float32",)
    """Number formats that it computes in; it publishes in any."""
    build: Callable[[Chosen], Any]
    """Builds the algorithm and the weight transport; the worker host sets it before `start`."""

    @abstractmethod
    def start(self, spec: TrainerSpec) -> Mapping[str, Any]:
        """Load model and optimizer; returns facts (parameters, max_context, vocab_size, fingerprint, ...)."""

    @abstractmethod
    def plan(self, lengths: Sequence[int], world_size: int, tokens_per_micro_batch: int = 0) -> ChunkPlan:
        """Split rows of these lengths; a pure function, called in the shell on an instance that was not started.

        `tokens_per_micro_batch` 0 is the trainer's own choice.
        """

    def estimate(self, spec: TrainerSpec, work: Workload) -> Estimate:
        """Estimate the memory and work of this rank; called on an instance that was not started, without the model's
        weights. Optional."""
        raise NotImplementedError

    async def ping(self) -> None:
        """Answers while its process lives, however busy its work is: what does not answer hangs, and is killed."""

    def begin_step(self, version: Version) -> None:
        """The version at the start of the step: what `lag` is counted from. Raises where it is not the trainer's own."""

    @abstractmethod
    def begin_update(self, denominators: Mapping[str, float]) -> None:
        """Zero gradients; `denominators` are the update's global counts, nominal where one is late."""

    @abstractmethod
    def accumulate(self, chunk: Chunk, last: bool) -> None:
        """Forward and backward of this rank's micro-batches. Raises ValueError where a row's lag is out of bounds.

        `last` where no further chunk follows; an update may end without it, as its last rows had no gradient or never came.
        """

    @abstractmethod
    def finish_update(self, denominators: Mapping[str, float]) -> UpdateResult:
        """Reduce, rescale to the true counts, clip and update."""

    def abort_update(self) -> None:
        """Forget gradients since begin_update."""

    @abstractmethod
    def forward(self, chunk: Chunk, columns: Sequence[str]) -> RowBatch:
        """Without gradient: fill columns for this rank's rows, each named by the key of an `Output`: `log_probs`, `entropy`,
        `values`, `log_probs_at:<column of the rows>`; `top_k:<k>` gives the columns `top_k_ids` and `top_k_log_probs`."""

    @abstractmethod
    def publish(
        self, version: Version, transport: Chosen, location: str, payload: Payload = "full", base: str = ""
    ) -> Manifest:
        """Hand the weights to a transport under Hugging Face names (adapters: peft's). All ranks call; rank 0's manifest
        counts. `base`: what a delta is on top of."""

    def transfer(self, manifest: Manifest, transport: Chosen, receivers: int, wait_s: float) -> int:
        """Give what was published last to the receivers of a live transport; all ranks call."""
        raise NotImplementedError

    def load_published(self, manifest: Manifest, transport: Chosen) -> None:
        """Take weights of another trainer (actor_fwd); same fail-closed checks as an engine."""
        raise NotImplementedError

    @abstractmethod
    def save(self, directory: str) -> None:
        """Model, optimizer, schedule and random state; all ranks call."""

    def snapshot(self, directory: str) -> None:
        """As `save` into a new directory, but returns as soon as training may go on; it counts once `saved` returned."""
        self.save(directory)

    async def saved(self) -> None:
        """Until all that `snapshot` took is on disk. Raises what went wrong with it."""

    @abstractmethod
    def load(self, directory: str) -> None:
        """Continue from `save` or `snapshot`, bit for bit, on any number of ranks."""

    @abstractmethod
    def export(self, directory: str) -> None:
        """A Hugging Face folder that `transformers` loads."""

    def sleep(self, parts: Sequence[str]) -> int:
        """Free `weights`, `optimizer`, `gradients` on the device; returns bytes really freed."""
        return 0

    def wake(self, parts: Sequence[str]) -> None:
        """Undo `sleep`."""

    def stop(self) -> None:
        """Release devices and process groups."""
