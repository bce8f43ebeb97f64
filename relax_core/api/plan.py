# SPDX-License-Identifier: Apache-2.0
"""The plan of a run as plain data, and estimates of the memory and work that a plan needs.

The planner decides which operations run in which role and on which worker processes. Every role reads the plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from relax_core.api.algorithm import Source

OffloadPart = Literal["weights", "kv", "optimizer", "gradients"]


class Reads(StrEnum):
    """The weights that an operation reads."""

    NONE = "none"
    STEP_START = "step-start"
    LATEST = "latest"
    FIXED = "fixed"


@dataclass(frozen=True, slots=True)
class Operation:
    """One kind of work that a role does on rows."""

    name: str
    """`role.verb`, such as `reference.log_probs`."""
    role: str
    consumes: frozenset[str]
    produces: frozenset[str]
    reads: Reads = Reads.NONE
    updates: str = ""
    """The model that the operation trains; empty: none."""
    row_filter: str = ""
    """Filter of the rows, such as `domain=maths`; empty: all rows. Producers of one column need distinct filters."""
    model: str = "actor"
    """The model whose weights the operation reads."""


@dataclass(frozen=True, slots=True)
class WorkerGroup:
    """The processes of one role or engine pool; they start and end together."""

    name: str
    size: int
    """Number of processes."""
    threads: int = 1
    devices: frozenset[str] = frozenset()
    """Names of the processes' devices, such as `gpu:0` or `cpu:0`. Groups that share a device lease it in turn."""
    offloads: tuple[OffloadPart, ...] = ()
    """Parts that are offloaded while another group holds the devices; all parts not listed stay in memory."""

    def devices_of(self, number: int) -> tuple[str, ...]:
        """Return the devices of process `number`; processes on one device get numbered names such as `gpu:0/1`."""
        names = sorted(self.devices, key=lambda name: (len(name), name)) or [self.name]
        each = len(names) // self.size
        return tuple(names[number * each : (number + 1) * each]) or (f"{names[number % len(names)]}/{number}",)

    def process_devices(self, number: int) -> tuple[str, ...]:
        """Return the devices of process `number`, by names without a number of the process: `gpu:0`."""
        return tuple(name.partition("/")[0] for name in self.devices_of(number)) if self.devices else ()


@dataclass(frozen=True, slots=True)
class Plan:
    """The planner's decisions; every role of a run gets the same plan."""

    mode: str
    operations: tuple[Operation, ...]
    """Operations, sorted so that each column is produced before it is consumed."""
    roles: tuple[str, ...]
    groups: Mapping[str, WorkerGroup]
    """role -> worker group; the key of an auxiliary engine pool is `engines-<pool>`."""
    trained_columns: tuple[str, ...]
    """Columns that must be ready before the actor may claim a row."""
    advantage_columns: tuple[str, ...] = ("rewards",)
    batch_statistics: bool = False
    """True: advantages are computed over all rows of a step, so the step is not streamed."""
    streams: bool = False
    """True: the actor trains groups as they become ready. False: the actor waits for all groups of a step."""
    needs_old_log_probs: bool = False
    """True: all old log-probs of a step are computed before its first update."""
    max_staleness: int | None = 0
    min_valid: int = 1
    source: Source = Source.ROLLOUT
    """Origin of the rows; only rows of a rollout have versions, rewards and lag."""
    group_size: int = 1
    """Samples of a group, including the greedy sample."""
    greedy: int | None = None
    """Index, in a group, of the sample that is drawn at temperature 0 and never trained; None: no such sample."""
    adapters_alone: bool = False
    """True: the actor publishes only adapters, which engines apply to the model they started with."""
    fit_columns: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """role -> columns that the role reads, for roles that train on the actor's rows later, such as a critic."""
    warm_up_steps: int = 0
    """Number of steps at the start in which the roles of `fit_columns` train and the actor does not."""
    media_pipeline: str = ""
    """Class of the media pipeline as `package.module:Class`; empty: the run has no media."""
    notes: tuple[str, ...] = field(default=())
    """Sentences for the user about decisions that the planner made and the user did not configure."""

    @property
    def consumed(self) -> frozenset[str]:
        """Return the columns that any operation reads."""
        return frozenset().union(*(operation.consumes for operation in self.operations))

    @property
    def producer(self) -> str:
        """Return the role that puts rows on the bus."""
        return "rollout" if self.source is Source.ROLLOUT else "source"

    @property
    def row_producers(self) -> str:
        """Return the value of `Wait.blocked_by` while the actor waits for rows."""
        return f"{self.producer}, then advantages" if self.has("advantages.compute") else self.producer

    @property
    def publishes(self) -> bool:
        """Return True if another role reads the weights that the actor trains."""
        return any(
            operation.reads in (Reads.LATEST, Reads.STEP_START) and operation.model == "actor" and not operation.updates
            for operation in self.operations
        )

    @property
    def shared(self) -> frozenset[str]:
        """Return the devices that belong to more than one worker group."""
        lives = Counter(device for group in self.groups.values() for device in group.devices)
        return frozenset(device for device, groups in lives.items() if groups > 1)

    def neighbours(self, role: str) -> tuple[str, ...]:
        """Return the roles whose worker groups share a device with this role's group."""
        own = self.groups[role].devices
        return tuple(name for name, group in self.groups.items() if name != role and group.devices & own)

    @property
    def device_sets(self) -> Counter[tuple[str, ...]]:
        """Return the number of processes on each set of devices."""
        groups = {group.name: group for group in self.groups.values()}.values()
        return Counter(group.process_devices(number) for group in groups for number in range(group.size))

    def num_gpus(self, process_devices: tuple[str, ...]) -> float:
        """Return the number of GPUs of a process with these devices; processes on one GPU have equal shares."""
        on = Counter(device for devices, many in self.device_sets.items() for device in devices for _ in range(many))
        return sum(1 / on[device] for device in process_devices if device.startswith("gpu:"))

    def has(self, operation: str) -> bool:
        return any(known.name == operation for known in self.operations)


RESERVED = "allocator"
"""Name of the part of an estimate that holds the memory reserved by the allocator on top of the tensors."""


@dataclass(frozen=True, slots=True)
class Workload:
    """The largest possible step: every row has the maximal length."""

    prompts: int
    group_size: int
    prompt_tokens: int
    """Tokens of the longest prompt."""
    new_tokens: int
    """Most sampled tokens of a row."""

    @property
    def rows(self) -> int:
        return self.prompts * self.group_size

    @property
    def row_tokens(self) -> int:
        return self.prompt_tokens + self.new_tokens


@dataclass(frozen=True, slots=True)
class Layout:
    """A way in which a trainer can share a model and its rows among ranks; `relax plan --layouts` compares them."""

    options: Mapping[str, int | str | bool]
    """Options of the trainer that differ from the configured ones."""
    tokens_per_micro_batch: int
    """Value of `batch.tokens_per_micro_batch`."""
    data_parallel: int = 1
    """Number of groups of ranks that compute different rows."""
    optimizer_ranks: int = 1
    """Number of ranks that share the optimizer's state of the same parameters."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """An estimate of the memory and work of one process, without the memory of its loaded libraries."""

    phases: Mapping[str, Mapping[str, int]]
    """phase (`train`, `generate`, ...) -> part (`parameters`, `activations`, ...) -> bytes at the phase's peak."""
    flops: Mapping[str, float] = field(default_factory=dict)
    """phase -> floating-point operations of one step in this process."""
    notes: tuple[str, ...] = ()
    """Sentences about what the figures omit or assume."""
    moved: Mapping[str, float] = field(default_factory=dict)
    """phase -> bytes of weights, gradients and moments that one step reads and writes in the memory of the device."""
    sent: Mapping[str, float] = field(default_factory=dict)
    """phase -> bytes that this process sends to other processes of its group in one step."""
    idle: Mapping[str, float] = field(default_factory=dict)
    """phase -> share of the time that this process waits for other stages of a pipeline, from 0 to below 1."""

    def tensors(self, phase: str) -> int:
        """Return the bytes of a phase without the allocator's reserve."""
        return sum(size for part, size in self.phases[phase].items() if part != RESERVED)

    def peak(self) -> tuple[str, int]:
        """Return the phase that needs the most memory, and its bytes."""
        sums = {phase: sum(parts.values()) for phase, parts in self.phases.items()}
        phase = max(sums, key=lambda name: sums[name], default="")
        return phase, sums.get(phase, 0)
