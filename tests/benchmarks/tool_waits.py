# SPDX-License-Identifier: Apache-2.0
"""An environment whose samples wait as real tools make them wait: a heavy-tailed number of calls, each log-normal.

The policy answers at once; then its tools run, nothing is computed, and the sample ends. The waits depend on the sample's
seed alone, so every mode and every policy meets the same ones.
"""

from __future__ import annotations

import asyncio
from random import Random
from typing import ClassVar

from pydantic import Field

from relax_core.api import Action, Environment, Observation, Options, Step, Task


class ToolWaitsOptions(Options):
    """Options of the waits."""

    median_s: float = Field(0.1, ge=0.0)
    """Median of one call."""
    sigma: float = Field(0.8, ge=0.0)
    """Spread of a call's logarithm: 0.8 puts one in a hundred at 6 times the median."""
    another: float = Field(0.3, ge=0.0, lt=1.0)
    """Chance that one more call follows."""
    most_s: float = Field(1.5, gt=0.0)
    """A sample's tools are stopped after this, as a time limit of tools would."""


class ToolWaits(Environment[ToolWaitsOptions]):
    """One answer, then the waits."""

    in_process: ClassVar[bool] = True

    async def reset(self, task: Task, seed: int) -> Observation | None:
        self._wait_s = waits(self.options, Random(f"tools {seed}"))
        return None

    async def step(self, action: Action) -> Step:
        await asyncio.sleep(self._wait_s)
        return Step("", done=True, info={"tool_s": self._wait_s})


def waits(options: ToolWaitsOptions, random: Random) -> float:
    """Seconds of one sample's tools."""
    total, calls = 0.0, 1
    while random.random() < options.another:
        calls += 1
    for _ in range(calls):
        total += options.median_s * random.lognormvariate(0.0, options.sigma)
    return min(total, options.most_s)
