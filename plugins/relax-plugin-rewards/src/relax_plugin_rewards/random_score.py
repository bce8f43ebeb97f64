# SPDX-License-Identifier: Apache-2.0
"""A random reward, for debugging and as a baseline that a real reward must beat. A policy can't learn from it.

The number depends only on seed, task and response, so a repeated or resumed run gets the same numbers.
"""

from __future__ import annotations

import hashlib
import math

from pydantic import model_validator

from relax_core.api import Options, Reward, Task, Trajectory


class RandomScoreOptions(Options):
    """Options of `random`."""

    seed: int = 0
    """Seed of the random scores."""
    low: float = 0.0
    """Lower bound of the random scores."""
    high: float = 1.0
    """Upper bound of the random scores."""

    @model_validator(mode="after")
    def _ordered(self) -> RandomScoreOptions:
        if not (self.low < self.high and math.isfinite(self.high - self.low)):
            raise ValueError(f"low = {self.low:g}, high = {self.high:g}: low must be less than high, and both finite")
        return self


class RandomScore(Reward[RandomScoreOptions]):
    """A reward drawn uniformly from `low` to `high`."""

    def score(self, task: Task, trajectory: Trajectory) -> float:
        asked = f"{self.options.seed}\0{task.id}\0{trajectory.response}".encode("utf-8", "surrogatepass")
        share = (int.from_bytes(hashlib.blake2b(asked, digest_size=8).digest(), "big") >> 11) / 2**53
        return self.options.low + share * (self.options.high - self.options.low)
