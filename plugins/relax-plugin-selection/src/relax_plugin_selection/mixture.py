# SPDX-License-Identifier: Apache-2.0
"""The `mixture` sampler: draws kinds of tasks in given shares; each task of a kind comes once per epoch of its kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from pydantic import Field, NonNegativeFloat

from relax_core.api import ConfigError, Options, Sampler, Task


class MixtureOptions(Options):
    column: str = "source"
    """Name of the task column whose value is a task's kind."""
    weights: dict[str, NonNegativeFloat] = Field(default_factory=dict)
    """Weight by kind, such as `{ maths = 2, code = 1 }`. A kind that is not named has weight 1; 0 excludes a kind."""


class Mixture(Sampler[MixtureOptions]):
    """Draws a kind by weight, then the next task of that kind in a seeded order."""

    def __init__(self, options: MixtureOptions | None = None) -> None:
        super().__init__(options)
        self._kinds: dict[str, list[int]] = {}
        self._taken: dict[str, int] = {}

    def open(self, tasks: Sequence[Task]) -> None:
        self._kinds = {}
        for index in range(len(tasks)):
            kind = tasks[index].column(self.options.column)
            if kind is None:
                fix = "give each task a value in that column, or choose another sampler.column"
                raise ConfigError(f"sampler.column = {self.options.column!r}", f"None in task {tasks[index].id}", fix)
            self._kinds.setdefault(str(kind), []).append(index)
        unknown = sorted(set(self.options.weights) - set(self._kinds))
        if unknown or not any(self._weight(kind) > 0 for kind in self._kinds):
            got = f"weights {dict(self.options.weights)} of kinds {sorted(self._kinds)}"
            raise ConfigError("sampler.weights", got, f"name values of column {self.options.column!r}, one above 0")

    def pick(self, group: int, num_tasks: int, seed: int) -> int:
        kinds = [kind for kind in sorted(self._kinds) if self._weight(kind) > 0]
        if not kinds:
            return Random(f"mixture {seed} {group}").randrange(num_tasks)
        kind = Random(f"mixture {seed} {group}").choices(kinds, [self._weight(kind) for kind in kinds])[0]
        members = self._kinds[kind]
        epoch, place = divmod(self._taken.get(kind, 0), len(members))
        self._taken[kind] = self._taken.get(kind, 0) + 1
        return Random(f"mixture {seed} {kind} {epoch}").sample(members, len(members))[place]

    def state(self) -> Mapping[str, Any]:
        return {"taken": self._taken} if self._taken else {}

    def load(self, state: Mapping[str, Any]) -> None:
        self._taken = dict(state.get("taken", {}))

    def _weight(self, kind: str) -> float:
        return self.options.weights.get(kind, 1.0)
