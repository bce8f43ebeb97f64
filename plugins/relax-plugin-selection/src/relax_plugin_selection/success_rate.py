# SPDX-License-Identifier: Apache-2.0
"""The `success-rate` sampler: tasks whose outcome is least certain come more often than those always or never solved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from pydantic import Field

from relax_core.api import Options, Sampler

MOST = 0.25
"""p (1 - p) at its height."""


class SuccessRateOptions(Options):
    floor: float = Field(0.02, gt=0.0, le=MOST)
    """Weight of a task that is always or never solved, against 0.25 of one solved half of the time and of an unseen one."""
    memory: float = Field(0.5, ge=0.0, lt=1.0)
    """How much of a task's former rate stays when it was tried again."""
    best: float = Field(1.0, gt=0.0)
    """The reward that counts as solved."""


class SuccessRate(Sampler[SuccessRateOptions]):
    """Weights tasks by p (1 - p), p being their recent mean reward (learnability, arXiv 2408.15099 and 2502.12272)."""

    def __init__(self, options: SuccessRateOptions | None = None) -> None:
        super().__init__(options)
        self._rates: dict[int, float] = {}

    def pick(self, group: int, num_tasks: int, seed: int) -> int:
        """By rejection, so that a pick costs the same however many tasks there are."""
        random = Random(f"success-rate {seed} {group}")
        while True:
            index = random.randrange(num_tasks)
            if random.random() * MOST <= self._weight(index):
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
