# SPDX-License-Identifier: Apache-2.0
"""Circuit breaker: a reward that fails alike on sample after sample has a typo, and training on what is left would hide it.

The caller saves the failing sample that `CircuitOpen` carries, and the run stops with exit code 3.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import asdict
from typing import Any, NamedTuple

from relax_core.api.errors import PluginError
from relax_core.api.task import Task
from relax_core.api.trajectory import Trajectory
from relax_core.rewards.result import RewardResult

FIRST = 16
WINDOW = 256
SCHEMA = 1


class RewardFault(NamedTuple):
    """Kind and place of a failure; equal faults are alike."""

    kind: str
    place: str


class CircuitOpen(PluginError):
    """Fix the reward: it fails alike on nearly everything. `sample` is what to save for `relax try`."""

    def __init__(self, reward: str, result: RewardResult, seen: str, sample: dict[str, Any]) -> None:
        message = (
            f"failed alike on {seen}: {result.error}; fix {result.place}, "
            f"then try it on the sample that failed: `relax try reward {reward} --data failing-sample.json` in the run's folder"
        )
        super().__init__(f"reward {reward}", message, result.frames)
        self.sample = sample


class CircuitBreaker:
    """The recent faults of one reward, without IO: `closed -> open`.

    Invariants:
    - It opens when the first `first` samples failed alike, or over half of the last `window`; a scored sample never opens it.
    - `_counts` counts the faults in `_recent`, which holds at most `window` samples.
    """

    def __init__(self, first: int = FIRST, window: int = WINDOW) -> None:
        self._first, self._window = first, window
        self._seen = 0
        self._recent: deque[RewardFault | None] = deque()
        self._counts: Counter[RewardFault] = Counter()

    def record(self, fault: RewardFault | None) -> str:
        """Take one sample's fault, or None for a scored one; return what failed alike once that opens it, else ''."""
        self._seen += 1
        self._recent.append(fault)
        if len(self._recent) > self._window and (oldest := self._recent.popleft()) is not None:
            self._counts[oldest] -= 1
        if fault is None:
            return ""
        self._counts[fault] += 1
        alike = self._counts[fault]
        if alike == self._seen == self._first:
            return f"the first {self._first} samples"
        return f"{alike} of the last {self._window} samples" if 2 * alike > self._window else ""


def failing_sample(reward: str, task: Task, trajectory: Trajectory, result: RewardResult) -> dict[str, Any]:
    """Make a JSON document of one sample: the task's row, what the policy wrote, and how the reward failed on it."""
    prompt = task.prompt if isinstance(task.prompt, str) else [asdict(message) for message in task.prompt]
    return {
        "schema": SCHEMA,
        "reward": reward,
        "outcome": result.outcome.value,
        "error": result.error,
        "frames": result.frames,
        "task": {"id": task.id, "prompt": prompt, "answer": task.answer, **task.metadata},
        "response": trajectory.response,
        "messages": [asdict(message) for message in trajectory.messages],
    }
