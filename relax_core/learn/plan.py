# SPDX-License-Identifier: Apache-2.0
"""Plans made from numbers alone, the same on every machine: micro-batches of a chunk, and the learning rate of a step.

Rows are sorted by length, so that padding them to a rectangle costs little. Every rank gets the same number of
micro-batches, because ranks meet in collectives once each. Needs no torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from relax_core.api.errors import ConfigError
from relax_core.api.trainer import ChunkPlan, OptimizerSpec

MicroBatch = tuple[int, ...]


def plan_micro_batches(lengths: Sequence[int], world_size: int, tokens: int) -> ChunkPlan:
    """Micro-batches of at most `tokens` padded tokens (a longer row is alone), balanced over the ranks."""
    by_length = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    batches = _even(_cut(by_length, lengths, tokens), world_size)
    batches.sort(key=lambda batch: -len(batch) * max((lengths[row] for row in batch), default=0))
    plan: list[list[MicroBatch]] = [[] for _ in range(world_size)]
    for at, batch in enumerate(batches):  # dealt to and fro, so that no rank always gets the larger one
        dealt, place = divmod(at, world_size)
        plan[place if dealt % 2 == 0 else world_size - 1 - place].append(batch)
    return ChunkPlan(tuple(tuple(own) for own in plan))


def _cut(by_length: Sequence[int], lengths: Sequence[int], tokens: int) -> list[MicroBatch]:
    batches: list[MicroBatch] = []
    start = 0
    for at, row in enumerate(by_length):
        longest = lengths[by_length[start]]
        if at > start and (at - start + 1) * max(longest, lengths[row]) > tokens:
            batches.append(tuple(by_length[start:at]))
            start = at
    if by_length:
        batches.append(tuple(by_length[start:]))
    return batches


def _even(batches: list[MicroBatch], world_size: int) -> list[MicroBatch]:
    """Halve the fullest until the ranks can share them; with fewer rows than ranks some stay empty."""
    while len(batches) % world_size:
        fullest = max(range(len(batches)), key=lambda i: (len(batches[i]), -i))
        rows = batches.pop(fullest)
        batches += [rows[: (len(rows) + 1) // 2], rows[(len(rows) + 1) // 2 :]]
    return batches


SCHEDULES = ("constant", "linear", "cosine")
"""After the warm-up: as it is, straight down to 0 at `total_steps`, or half a cosine down to 0."""


def lr_factor(spec: OptimizerSpec, step: int) -> float:
    """The factor of `lr` in the step that starts at version `step`: from the step alone, the same after every resume."""
    if spec.schedule not in SCHEDULES:
        raise ConfigError("optimizer.schedule", repr(spec.schedule), f"use one of {', '.join(SCHEDULES)}")
    if step < spec.warmup_steps:
        return (step + 1) / spec.warmup_steps
    if spec.schedule == "constant":
        return 1.0
    if spec.total_steps <= 0:
        raise ConfigError("optimizer.schedule", repr(spec.schedule), "it ends at the last step; set steps")
    done = (step - spec.warmup_steps) / max(1, spec.total_steps - spec.warmup_steps)
    left = 1.0 - min(1.0, done)
    return left if spec.schedule == "linear" else 0.5 * (1.0 - math.cos(math.pi * left))
