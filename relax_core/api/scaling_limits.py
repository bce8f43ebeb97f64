# SPDX-License-Identifier: Apache-2.0
"""The limits of `[autoscale]` on the proposals of a scaling policy."""

from __future__ import annotations

from pydantic import NonNegativeFloat, PositiveInt

from relax_core.api.options import Options


class ScalingLimits(Options):
    """The keys of `[autoscale]` besides the policy's options: limits on the policy's proposals."""

    max_engines: PositiveInt = 8
    """Most engines; the least number is `placement.rollout.min_engines`."""
    out_cooldown_s: NonNegativeFloat = 30.0
    """Seconds after a change of the pool, or its start, before engines may join."""
    in_cooldown_s: NonNegativeFloat = 300.0
    """Seconds after a change of the pool, or its start, before engines may leave."""
    max_joining: PositiveInt = 4
    """Most engines that join in one change."""
    max_leaving: PositiveInt = 1
    """Most engines that leave in one change."""
