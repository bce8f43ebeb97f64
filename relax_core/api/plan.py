# SPDX-License-Identifier: Apache-2.0
"""Plain data of a plan, and the estimates of memory and work that it is checked with.

The planner decides which operations run in which role and on which workers; roles read it.
A trainer or an engine that can tell implements `estimate`; one that does not is planned for without it, and that is said.
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
    """One thing a role can do to rows."""

    name: str
    """`role.verb`: `reference.log_probs`."""
    role: str
    consumes: frozenset[str]
    produces: frozenset[str]
    reads: Reads = Reads.NONE
    updates: str = ""
    """The model it trains."""
    scope: str = "row"
    """row, group or batch: how much must be ready before it starts."""
    row_filter: str = ""
    """Two producers of one column need disjoint filters, such as `domain=maths`."""
    trigger: str = "rows"
    """rows, step or admission."""
    model: str = "actor"
    """Whose weights it reads."""


@dataclass(frozen=True, slots=True)
class WorkerGroup:
    """Processes that die together and do the work of one or more roles."""

    name: str
    size: int
    threads: int = 1
    devices: frozenset[str] = frozenset()
    """Devices that it lives on; groups with devices in common lease them one after another."""
    offloads: tuple[OffloadPart, ...] = ()
    """Parts that are offloaded while others hold the devices; the other parts stay where they are."""

    def devices_of(self, number: int) -> tuple[str, ...]:
        """Name the part of the devices that one of its processes has; processes that share one have a place on it each."""
        names = sorted(self.devices, key=lambda name: (len(name), name)) or [self.name]
        each = len(names) // self.size
        return tuple(names[number * each : (number + 1) * each]) or (f"{names[number % len(names)]}/{number}",)

    def process_devices(self, number: int) -> tuple[str, ...]:
        """Name the devices of one of its processes, shared ones by their names alone."""
        return tuple(name.partition("/")[0] for name in self.devices_of(number)) if self.devices else ()


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything the planner decided; the same for every role of a run."""

    mode: str
    operations: tuple[Operation, ...]
    """In an order in which each one's columns exist before it runs."""
    roles: tuple[str, ...]
    groups: Mapping[str, WorkerGroup]
    """Worker group by role; roles that share devices name the same group."""
    trained_columns: tuple[str, ...]
    """Must be ready before the actor may claim a row."""
    advantage_columns: tuple[str, ...] = ("rewards",)
    batch_statistics: bool = False
    """Advantages need the whole step's rows; streaming is off."""
    streams: bool = False
    """The actor trains on groups as they are ready; else it waits for all of the step's."""
    needs_old_log_probs: bool = False
    """Several updates a step: all of the old policy's log-probs come before the first one."""
    max_staleness: int | None = 0
    min_valid: int = 1
    source: Source = Source.ROLLOUT
    """Origin of rows; only those of a rollout have versions, rewards and lag."""
    group_size: int = 1
    greedy: int | None = None
    """Place in a group of the sample that is drawn at temperature 0 and not trained."""
    adapters_alone: bool = False
    """What is published are adapters, which engines lay over the model that they started with."""
    fit_columns: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By role that follows the actor and trains on the same rows: the columns that it reads."""
    warm_up_steps: int = 0
    """First steps, in which only those train."""
    notes: tuple[str, ...] = field(default=())
    """What the planner turned off or chose, in words."""

    @property
    def consumed(self) -> frozenset[str]:
        """Columns that some operation reads."""
        return frozenset().union(*(operation.consumes for operation in self.operations))

    @property
    def producer(self) -> str:
        """The role that puts rows on the bus."""
        return "rollout" if self.source is Source.ROLLOUT else "source"

    @property
    def owed_rows(self) -> str:
        """Name who owes the actor its rows."""
        return f"{self.producer}, then advantages" if self.has("advantages.compute") else self.producer

    @property
    def publishes(self) -> bool:
        """Tell whether another role reads the weights that the actor trains."""
        return any(
            operation.reads in (Reads.LATEST, Reads.STEP_START) and operation.model == "actor" and not operation.updates
            for operation in self.operations
        )

    @property
    def shared(self) -> frozenset[str]:
        """Devices of more than one worker group."""
        lives = Counter(device for group in self.groups.values() for device in group.devices)
        return frozenset(device for device, groups in lives.items() if groups > 1)

    def neighbours(self, role: str) -> tuple[str, ...]:
        """Roles that it shares devices with."""
        own = self.groups[role].devices
        return tuple(name for name, group in self.groups.items() if name != role and group.devices & own)

    @property
    def device_sets(self) -> Counter[tuple[str, ...]]:
        """Count the processes that have the same devices, for all devices that somebody has."""
        groups = {group.name: group for group in self.groups.values()}.values()
        return Counter(group.process_devices(number) for group in groups for number in range(group.size))

    def num_gpus(self, process_devices: tuple[str, ...]) -> float:
        """Return the GPUs that one process at this place counts for: an equal part of each GPU, shared with all who use
        it."""
        on = Counter(device for devices, many in self.device_sets.items() for device in devices for _ in range(many))
        return sum(1 / on[device] for device in process_devices if device.startswith("gpu:"))

    def has(self, operation: str) -> bool:
        return any(known.name == operation for known in self.operations)


RESERVED = "allocator"
"""The part that is of no tensor: what an allocator keeps beside them."""


@dataclass(frozen=True, slots=True)
class Workload:
    """A step at its largest: all rows as long as they may become."""

    prompts: int
    group_size: int
    prompt_tokens: int
    """Of the longest prompt."""
    new_tokens: int
    """Most that are sampled of one row."""

    @property
    def rows(self) -> int:
        return self.prompts * self.group_size

    @property
    def row_tokens(self) -> int:
        return self.prompt_tokens + self.new_tokens


@dataclass(frozen=True, slots=True)
class Estimate:
    """An estimate for one process: the memory and work beyond what it holds once its libraries are loaded."""

    phases: Mapping[str, Mapping[str, int]]
    """By phase (`train`, `generate`, ...) and part (`parameters`, `activations`, ...): bytes at the phase's peak."""
    flops: Mapping[str, float] = field(default_factory=dict)
    """By phase: floating-point operations of one step in this process."""
    notes: tuple[str, ...] = ()
    """What the figures leave out or take for granted."""

    def tensors(self, phase: str) -> int:
        """Bytes of a phase without what the allocator keeps."""
        return sum(size for part, size in self.phases[phase].items() if part != RESERVED)

    def peak(self) -> tuple[str, int]:
        """The phase that needs most, and its bytes."""
        sums = {phase: sum(parts.values()) for phase, parts in self.phases.items()}
        phase = max(sums, key=lambda name: sums[name], default="")
        return phase, sums.get(phase, 0)
