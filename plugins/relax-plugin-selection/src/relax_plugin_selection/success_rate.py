# SPDX-License-Identifier: Apache-2.0
"""The `success-rate` sampler: tasks that are sometimes solved come more often than tasks always or never solved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from pydantic import Field

from relax_core.api import Options, Sampler

MAX_WEIGHT = 0.25
"""Maximum of a task's weight p (1 - p), for p = 1/2."""


class SuccessRateOptions(Options):
    floor: float = Field(0.02, gt=0.0, le=MAX_WEIGHT)
    """Weight of a task that is always or never solved. A task solved half of the time, or not yet tried, weighs 0.25."""
    memory: float = Field(0.5, ge=0.0, lt=1.0)
    """Weight of a task's former success rate in the average with the rate of its newest group."""
    best: float = Field(1.0, gt=0.0)
    """Reward of a sample that solves its task completely."""


class SuccessRate(Sampler[SuccessRateOptions]):
    """Draws tasks by weight p (1 - p), p = recent mean reward / `best` (learnability, arXiv 2408.15099, 2502.12272)."""

    def __init__(self, options: SuccessRateOptions | None = None) -> None:
        super().__init__(options)
        self._rates: dict[int, float] = {}

    def pick(self, group: int, num_tasks: int, seed: int) -> int:
        """Pick a task by rejection sampling; its cost does not depend on the number of tasks."""
        random = Random(f"success-rate {seed} {group}")
        while True:
            index = random.randrange(num_tasks)
            if random.random() * MAX_WEIGHT <= self._weight(index):
                return index

    def learned(self, group: int, task: int, rewards: Sequence[float]) -> None:
        if not rewards:
            return
        rate = min(1.0, max(0.0, sum(rewards) / len(rewards) / self.options.best))
        former = self._rates.get(task, rate)
        self._rates[task] = self.options.memory * former + (1.0 - self.options.memory) * rate

    def state(self) -> Mapping[str, Any]:
        return {"rates": {str(task): rate for task, rate in self._rates.items()}} if self._rates else {}

    def load(self, state: Mapping[str, Any]) -> None:
        self._rates = {int(task): rate for task, rate in state.get("rates", {}).items()}

    def _weight(self, task: int) -> float:
        rate = self._rates.get(task, 0.5)
        return max(self.options.floor, rate * (1.0 - rate))
