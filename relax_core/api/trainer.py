# SPDX-License-Identifier: Apache-2.0
"""The contract of trainers: training backends with one instance per rank, each in a worker process.

The role claims rows and plans chunks; ranks only compute. A step has one or more updates: begin_update -> accumulate*
-> finish_update, or abort_update. finish_update does, in this order: all-reduce, unscale, rescale, norm, clip, update.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, Generic

from relax_core.api.batch import RowBatch
from relax_core.api.component import Chosen, Configurable, OptionsT
from relax_core.api.plan import Estimate, Layout, Workload
from relax_core.api.weights import Manifest, Payload, Version


@dataclass(frozen=True, slots=True)
class OptimizerSpec:
    """The `[optimizer]` settings, the same for every trainer backend."""

    lr: float
    schedule: str = "constant"
    warmup_steps: int = 0
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    grad_clip: float = 1.0
    """Largest norm of the gradient; 0: no clipping."""
    total_steps: int = 0
    first_step: int = 0
    """Step with the first update, at which the schedule starts; the steps before train only the critic."""


@dataclass(frozen=True, slots=True)
class TrainerSpec:
    """The settings for the start of one rank of a trainer."""

    model: Mapping[str, Any]
    """The `[model]` table: path, dtype, lora, freeze, ..."""
    algorithm: Chosen
    optimizer: OptimizerSpec
    role: str = "actor"
    """actor, critic, reference, actor_fwd or teacher; forward-only roles never call `begin_update`."""
    seed: int = 0
    deterministic: bool = False
    max_staleness: int = 0
    """Largest lag in versions of a trained token; -1: no bound."""
    tokens_per_micro_batch: int = 0
    """Most tokens of a micro-batch; 0: the trainer chooses."""
    rank: int = 0
    world_size: int = 1
    rendezvous: str = ""
    """`host:port` at which torch.distributed connects the ranks, if world_size > 1."""
    temperature: float = 1.0
    """Sampling temperature; log-probs come from logits / temperature."""
    media: str = ""
    """Directory of the run's media store (`relax_core.media.store`); empty: the run has no media."""
    suppress_tokens: tuple[int, ...] = ()
    """Ids that are never sampled; log-probs come from the distribution without them."""
    publish_dtype: str = ""
    """Number format of published weights; empty: the format of `model`."""


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """The split of a chunk into micro-batches: `micro_batches[rank]` lists the row indices of each micro-batch."""

    micro_batches: tuple[tuple[tuple[int, ...], ...], ...]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows and their split into micro-batches, sent to every rank."""

    rows: RowBatch
    plan: ChunkPlan
    skipped: int = 0
    """Number of rows left out because they have no gradient; the denominators still count these rows."""


class UpdateOutcome(StrEnum):
    APPLIED = "applied"
    OVERFLOW = "overflow"
    """Gradients too large for fp16; the role sends the chunks again, and the trainer lowers the loss scale."""
    NOT_FINITE = "not_finite"


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """The result of one update."""

    outcome: UpdateOutcome
    metrics: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """name -> (sum, count) over all ranks, as in `Loss.metrics`."""
    grad_norm: float = 0.0
    lr: float = 0.0


@dataclass(frozen=True, slots=True)
class TrainerWork:
    """The computing that a rank did in a step. The work of several ranks, or parts of a step, can be added."""

    flops: float = 0.0
    """Floating-point operations of updates: forward and backward passes, without padding and recomputation."""
    forward_flops: float = 0.0
    """Floating-point operations of forward passes without gradient."""
    tokens: float = 0.0
    """Tokens in the model's inputs, with padding."""
    padding: float = 0.0
    """The part of `tokens` that is padding."""
    peak_flops_per_s: float = 0.0
    """Peak rate of the devices in `model.dtype`; 0: unknown."""

    def plus(self, other: TrainerWork) -> TrainerWork:
        return TrainerWork(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


class Trainer(Configurable[OptionsT], Generic[OptionsT]):
    """One rank of a training backend."""

    kind: ClassVar[str] = "trainer"
    streams: ClassVar[bool] = True
    """True: `accumulate` may run before all chunks of the update are known."""
    replays_routing: ClassVar[bool] = False
    """True: rows with `routed_experts` visit these experts, and `forward` can return `routed_experts`."""
    dtypes: ClassVar[tuple[str, ...]] = ("float32",)
    """Number formats in which the trainer can compute; it must be able to publish weights in any format."""
    float32_head: ClassVar[bool] = False
    """True: the trainer can compute logits in float32 with any `model.dtype` (`model.head_dtype`)."""
    profiles: ClassVar[bool] = False
    """True: the trainer can record profiles (`start_profile`)."""
    build: Callable[[Chosen], Any]
    """Function that builds the algorithm and the weight transport. The core sets the function before `start`."""

    @abstractmethod
    def start(self, spec: TrainerSpec) -> Mapping[str, Any] | Trainer[Any]:
        """Load model and optimizer; return facts: parameters, max_context, vocab_size, fingerprint, ...

        May instead return another trainer, of a module that is slow to import. That trainer takes this one's place: it
        gets the call of `start` and all later calls.
        """

    @abstractmethod
    def plan(self, lengths: Sequence[int], world_size: int, tokens_per_micro_batch: int = 0) -> ChunkPlan:
        """Split rows of these lengths into micro-batches; a pure function.

        Called in the role, on an instance that was not started. `tokens_per_micro_batch` 0: the trainer chooses.
        """

    def estimate(self, spec: TrainerSpec, work: Workload) -> Estimate:
        """Estimate the memory and work of this rank; optional.

        Called on an instance that was not started. Must not load the model's weights.
        """
        raise NotImplementedError

    def layouts(self, spec: TrainerSpec, work: Workload) -> Iterable[Layout]:
        """Yield the layouts of `spec.world_size` ranks that `relax plan --layouts` compares by their estimates; optional.

        Called on an instance that was not started. A layout that can't work is yielded too: its estimate raises
        ConfigError with the reason.
        """
        return ()

    async def ping(self) -> None:
        """Return at once, also while another call works; a process that does not answer is killed."""

    def begin_step(self, version: Version) -> None:
        """Begin the step at `version`, from which lags are measured; raise if the weights have a different version."""

    @abstractmethod
    def begin_update(self, denominators: Mapping[str, float]) -> None:
        """Zero the gradients; `denominators` are the update's global counts, estimated while rows are still missing."""

    @abstractmethod
    def accumulate(self, chunk: Chunk, last: bool) -> None:
        """Run this rank's micro-batches forward and backward. Raises ValueError for a row whose lag is out of bounds.

        `last`: True if no chunk follows in this update. An update whose final rows lack a gradient has no `last` chunk.
        """

    @abstractmethod
    def finish_update(self, denominators: Mapping[str, float]) -> UpdateResult:
        """Reduce gradients, rescale them to the true counts `denominators`, clip and update."""

    def abort_update(self) -> None:
        """Discard the gradients since `begin_update`."""

    def work(self) -> TrainerWork:
        """Return the computing of this rank since `begin_step` or the last call, whichever is later; optional.

        A rank that computes the same rows as another one returns only its peak.
        """
        return TrainerWork()

    @abstractmethod
    def forward(self, chunk: Chunk, columns: Sequence[str]) -> RowBatch:
        """Compute columns for this rank's rows without gradient.

        `columns` are keys of `Output`: `log_probs`, `entropy`, `values`, `log_probs_at:<column of the rows>`;
        `top_k:<k>` returns the columns `top_k_ids` and `top_k_log_probs`.
        """

    @abstractmethod
    def publish(
        self, version: Version, transport: Chosen, location: str, payload: Payload = "full", base: str = ""
    ) -> Manifest:
        """Send the weights to a transport, under Hugging Face names, or peft names for adapters.

        Called on all ranks; rank 0's manifest counts. `base`: as in `Manifest.base`.
        """

    def transfer(self, manifest: Manifest, transport: Chosen, receivers: int, wait_s: float) -> int:
        """Send the last published version to receivers of a live transport; return how many got it."""
        raise NotImplementedError

    def load_published(self, manifest: Manifest, transport: Chosen) -> None:
        """Load weights that another trainer published, with the checks of an engine; for the role actor_fwd."""
        raise NotImplementedError

    @abstractmethod
    def save(self, directory: str) -> None:
        """Write model, optimizer, schedule and random state; called on all ranks."""

    def snapshot(self, directory: str) -> None:
        """Save like `save`, but return as soon as training may continue; the files are complete after `saved`."""
        self.save(directory)

    async def saved(self) -> None:
        """Wait until the last `snapshot` is on disk; raise its error if it failed."""

    @abstractmethod
    def load(self, directory: str) -> None:
        """Restore the state that `save` or `snapshot` wrote, bit for bit, on any number of ranks."""

    @abstractmethod
    def export(self, directory: str) -> None:
        """Write a Hugging Face folder that `transformers` can load."""

    def start_profile(self, ranks: Sequence[int]) -> None:
        """On one of `ranks`, record the operations of all calls from now on. An open profile is discarded."""
        raise NotImplementedError

    def stop_profile(self, path: str, max_bytes: int) -> int:
        """End the profile and write its files, whose names begin with `path` and this rank's number.

        Returns the size of the trace, which is deleted if it exceeds `max_bytes`; 0 on ranks without a profile.
        """
        raise NotImplementedError

    def offload(self, parts: Sequence[str]) -> int:
        """Free the device memory of `weights`, `optimizer` or `gradients`; return the number of bytes freed."""
        return 0

    def onload(self, parts: Sequence[str]) -> None:
        """Load parts that `offload` has freed."""

    def stop(self) -> None:
        """Release devices and process groups."""
