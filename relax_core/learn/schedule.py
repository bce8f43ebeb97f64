# SPDX-License-Identifier: Apache-2.0
"""The learning rate as a function of the step alone, so that it is equal for every trainer and after every resume."""

from __future__ import annotations

import math

from relax_core.api.errors import ConfigError
from relax_core.api.trainer import OptimizerSpec

SCHEDULES = ("constant", "linear", "cosine")
"""After the warm-up: as it is, straight down to 0 at `total_steps`, or half a cosine down to 0."""


def lr_factor(spec: OptimizerSpec, step: int) -> float:
    """What `lr` is multiplied with in the step that starts at version `step`."""
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
