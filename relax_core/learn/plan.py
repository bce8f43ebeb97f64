# SPDX-License-Identifier: Apache-2.0
"""Plans that need neither rows nor torch: the micro-batches of a chunk, and the learning rate of a step."""

from __future__ import annotations

import math
from collections.abc import Sequence

from relax_core.api.errors import ConfigError
from relax_core.api.trainer import ChunkPlan, OptimizerSpec


def plan_micro_batches(lengths: Sequence[int], world_size: int, tokens: int) -> ChunkPlan:
    """Plan micro-batches of at most `tokens` padded tokens, balanced over the ranks; a longer row gets its own.

    Rows are sorted by length, so that a micro-batch needs little padding. Every rank gets the same number of
    micro-batches, because each has collective operations of all ranks. If rows are few, some micro-batches are empty.
    """
    by_length = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    batches: list[tuple[int, ...]] = []
    start = 0
    for at in range(1, len(by_length) + 1):
        if at == len(by_length) or (at - start + 1) * lengths[by_length[start]] > tokens:
            batches.append(tuple(by_length[start:at]))
            start = at
    while len(batches) % world_size:  # halve the micro-batch with most rows until the ranks get equal numbers
        fullest = max(range(len(batches)), key=lambda i: (len(batches[i]), -i))
        rows = batches.pop(fullest)
        batches += [rows[: (len(rows) + 1) // 2], rows[(len(rows) + 1) // 2 :]]
    batches.sort(key=lambda batch: -len(batch) * max((lengths[row] for row in batch), default=0))
    plan: list[list[tuple[int, ...]]] = [[] for _ in range(world_size)]
    for at, batch in enumerate(batches):  # deal back and forth, so that no rank always gets the larger batch
        dealt, place = divmod(at, world_size)
        plan[place if dealt % 2 == 0 else world_size - 1 - place].append(batch)
    return ChunkPlan(tuple(tuple(own) for own in plan))


SCHEDULES = ("constant", "linear", "cosine")
"""Schedules of the learning rate after the warm-up: constant; linear to 0 at `total_steps`; half a cosine to 0."""


def lr_factor(spec: OptimizerSpec, step: int) -> float:
    """Return the number by which `lr` is multiplied in the step that starts at version `step`, also after a resume."""
    if spec.schedule not in SCHEDULES:
        raise ConfigError("optimizer.schedule", repr(spec.schedule), f"use one of {', '.join(SCHEDULES)}")
    step = max(0, step - spec.first_step)
    if step < spec.warmup_steps:
        return (step + 1) / spec.warmup_steps
    if spec.schedule == "constant":
        return 1.0
    if spec.total_steps <= 0:
        raise ConfigError("optimizer.schedule", repr(spec.schedule), "this schedule ends at the last step; set steps")
    done = (step - spec.warmup_steps) / max(1, spec.total_steps - spec.first_step - spec.warmup_steps)
    left = 1.0 - min(1.0, done)
    return left if spec.schedule == "linear" else 0.5 * (1.0 - math.cos(math.pi * left))
