# SPDX-License-Identifier: Apache-2.0
"""Estimates of a worker process made before it is started: bytes by phase and part, and the arithmetic of a step.

A trainer or an engine that can tell implements `estimate`; one that does not is planned for without it, and that is said.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

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
