# SPDX-License-Identifier: Apache-2.0
"""The fuse: a reward that fails alike on sample after sample has a typo, and training on what is left would hide it.

A state machine without IO. It trips on the first 16 samples failing alike, or on over half of the last 256; the
caller saves the failing sample that `CircuitOpen` carries, and the run stops with exit code 3.
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
    """How a sample failed; equal faults are alike."""

    kind: str
    place: str


class CircuitOpen(PluginError):
    """Fix the reward: it fails alike on nearly everything. `sample` is what to save for `relax try`."""

    def __init__(self, reward: str, verdict: RewardResult, seen: str, sample: dict[str, Any]) -> None:
        message = (
            f"failed alike on {seen}: {verdict.error}; fix {verdict.place}, "
            f"then try it on the sample that failed: `relax try reward {reward} --data failing-sample.json` in the run's folder"
        )
        super().__init__(f"reward {reward}", message, verdict.frames)
        self.sample = sample


class CircuitBreaker:
    """One reward's recent faults."""

    def __init__(self, first: int = FIRST, window: int = WINDOW) -> None:
        self._first, self._window = first, window
        self._seen = 0
        self._recent: deque[RewardFault | None] = deque()
        self._counts: Counter[RewardFault] = Counter()

    def record(self, fault: RewardFault | None) -> str:
        """Take one sample's fault, or None for a judged one; says what failed alike once that trips, else ''."""
        self._seen += 1
        self._recent.append(fault)
        if len(self._recent) > self._window:
            self._forget(self._recent.popleft())
        if fault is None:
            return ""
        self._counts[fault] += 1
        alike = self._counts[fault]
        if alike == self._seen == self._first:
            return f"the first {self._first} samples"
        return f"{alike} of the last {self._window} samples" if 2 * alike > self._window else ""

    def _forget(self, fault: RewardFault | None) -> None:
        if fault is not None:
            self._counts[fault] -= 1
            if not self._counts[fault]:
                del self._counts[fault]


def fault_of(verdict: RewardResult) -> RewardFault | None:
    return RewardFault(verdict.kind, verdict.place) if verdict.failed else None


def failing_sample(reward: str, task: Task, trajectory: Trajectory, verdict: RewardResult) -> dict[str, Any]:
    """One sample as a JSON document: the task's row, what the policy wrote, and how the reward failed on it."""
    prompt = task.prompt if isinstance(task.prompt, str) else [asdict(message) for message in task.prompt]
    return {
        "schema": SCHEMA,
        "reward": reward,
        "outcome": verdict.outcome.value,
        "error": verdict.error,
        "frames": verdict.frames,
        "task": {"id": task.id, "prompt": prompt, "answer": task.answer, **task.metadata},
        "response": trajectory.response,
        "messages": [asdict(message) for message in trajectory.messages],
    }
