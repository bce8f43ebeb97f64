# SPDX-License-Identifier: Apache-2.0
"""The plan as data: which operations run in which role, on which workers. Made by `control.planner`, read by roles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from relax_core.api import wire
from relax_core.api.role import Operation


@wire.register
@dataclass(frozen=True, slots=True)
class WorkerGroup:
    """Processes that die together and do the work of one or more roles."""

    name: str
    size: int
    threads: int = 1
    gpus_each: float = 0.0


@wire.register
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
    needs_old_log_probs: bool = False
    """Several updates a step: all of the old policy's log-probs come before the first one."""
    max_staleness: int | None = 0
    min_valid: int = 1
    notes: tuple[str, ...] = field(default=())
    """What the planner turned off or chose, in words."""

    def has(self, operation: str) -> bool:
        return any(known.name == operation for known in self.operations)
