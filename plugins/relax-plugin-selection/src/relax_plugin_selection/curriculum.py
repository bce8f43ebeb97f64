# SPDX-License-Identifier: Apache-2.0
"""The `curriculum` sampler: draws from the easiest tasks, whose number grows until all tasks take part."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from math import ceil, isfinite, nan
from random import Random

from pydantic import Field, PositiveInt

from relax_core.api import ConfigError, Options, Sampler, Task


class CurriculumOptions(Options):
    column: str = "difficulty"
    """Name of the task column with a difficulty as a number; tasks with smaller numbers come earlier."""
    start: float = Field(0.2, gt=0.0, le=1.0)
    """Share of all tasks from which the first group is drawn: the easiest tasks."""
    groups: PositiveInt = 1000
    """Number of groups after which all tasks take part; the share of tasks grows linearly until then."""


class Curriculum(Sampler[CurriculumOptions]):
    """Draws tasks from easy to hard, at a fixed pace by group number (curriculum learning, Bengio et al. 2009)."""

    _order: Sequence[int] = ()

    def open(self, tasks: Sequence[Task]) -> None:
        ranks = [self._difficulty(tasks[index]) for index in range(len(tasks))]
        self._order = sorted(range(len(tasks)), key=ranks.__getitem__)

    def pick(self, group: int, num_tasks: int, seed: int) -> int:
        done = min(1.0, group / self.options.groups)
        share = self.options.start + (1.0 - self.options.start) * done
        place = Random(f"curriculum {seed} {group}").randrange(max(1, ceil(share * num_tasks)))
        return self._order[place] if self._order else place

    def _difficulty(self, task: Task) -> float:
        value = task.column(self.options.column)
        number = nan
        with suppress(TypeError, ValueError, OverflowError):
            number = float(value)  # type: ignore[arg-type]
        if not isfinite(number):
            fix = "give each task a finite number in that column, or choose another sampler.column"
            raise ConfigError(f"sampler.column = {self.options.column!r}", f"{value!r} in task {task.id}", fix)
        return number
