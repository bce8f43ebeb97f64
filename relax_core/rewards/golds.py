# SPDX-License-Identifier: Apache-2.0
"""The check of gold answers: each must earn the best score of its own reward, boxed and plain.

A gold answer that its reward can't read, or reads only in part, trains the policy on wrong rewards. The check costs one
call of the reward per response, so a large file is checked at `MOST_CHECKED` rows with equal distances.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from relax_core.api.errors import ConfigError
from relax_core.api.task import Task
from relax_core.rewards.host import GoldResult
from relax_core.rewards.scorer import RewardScorer

MOST_CHECKED = 1000
SHOWN = 5


class Tasks(Protocol):
    """Tasks by index, each with a location to display."""

    def __getitem__(self, index: int, /) -> Task: ...

    def where(self, index: int) -> str: ...


@dataclass(frozen=True, slots=True)
class BadGold:
    """A gold answer that does not earn the best score of its own reward."""

    index: int
    where: str
    """Location of the task, such as `file:line`."""
    reward: str
    reason: str

    def __str__(self) -> str:
        return f"{self.where}: reward {self.reward}: {self.reason}"


@dataclass(frozen=True, slots=True)
class GoldReport:
    """The result of a check of the gold answers of one file."""

    total: int
    """Number of tasks in the file."""
    tried: int
    """Number of tasks that were looked at: all, or `MOST_CHECKED`."""
    checked: int
    """Number of these tasks with a gold answer that a reward reads."""
    bad: tuple[BadGold, ...] = ()
    """The first fault of each task with one, in order."""
    read: tuple[tuple[str, str, GoldResult], ...] = ()
    """(location, reward, result) of the first `SHOWN` gold answers that were read."""

    @property
    def share(self) -> float:
        """Share of the checked tasks whose gold answer does not earn the best score."""
        return len(self.bad) / self.checked if self.checked else 0.0

    def __str__(self) -> str:
        left = f"; {self.total - self.tried} further rows were not checked" if self.tried < self.total else ""
        spread = ", evenly spread" if left else ""
        return f"{len(self.bad)} of {self.checked} gold answers ({self.share:.1%}{spread}) do not earn the best score{left}"

    def refuse(self, key: str, most: float) -> None:
        """Raise ConfigError if the share of bad gold answers exceeds `most`. `key`: the configuration key of the file."""
        if self.share <= most:
            return
        first = "; ".join(map(str, self.bad[:SHOWN]))
        more = f"; and {len(self.bad) - SHOWN} more" if len(self.bad) > SHOWN else ""
        fix = f"correct or remove these rows, which `relax data check` lists, or raise data.max_bad_golds = {most:g}"
        raise ConfigError(key, f"{self}: {first}{more}", fix)


async def check_golds(scorer: RewardScorer, tasks: Tasks, indices: Sequence[int]) -> GoldReport:
    """Score the gold answers of at most `MOST_CHECKED` of the tasks at `indices`, evenly spread."""
    count = min(len(indices), MOST_CHECKED)
    chosen = [indices[number * len(indices) // count] for number in range(count)]
    found = await scorer.golds([tasks[index] for index in chosen])
    bad: list[BadGold] = []
    read: list[tuple[str, str, GoldResult]] = []
    for index, results in zip(chosen, found, strict=True):
        faults = [(name, result.fault) for name, result in results.items() if result.fault]
        if faults:
            bad.append(BadGold(index, tasks.where(index), *faults[0]))
        if len(read) < SHOWN:
            read += [(tasks.where(index), name, result) for name, result in results.items() if not result.error]
    return GoldReport(len(indices), count, sum(map(bool, found)), tuple(bad), tuple(read[:SHOWN]))
