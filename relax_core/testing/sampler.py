# SPDX-License-Identifier: Apache-2.0
"""The conformance suite of samplers: valid picks, reproducible from seed and history, and a complete saved state."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from relax_core.api.task import Task
from relax_core.testing.suite import Suite

SEED = 11


class SamplerSuite(Suite):
    """The suite of a sampler; a subclass sets `component`."""

    kind = "sampler"
    num_tasks: ClassVar[int] = 7
    picks: ClassVar[int] = 25
    """Number of groups to pick tasks for; more than `num_tasks`."""
    columns: ClassVar[Mapping[str, Sequence[Any]]] = {}
    """Metadata columns that the sampler reads; tasks cycle through the values: `{"difficulty": (1, 2, 3)}`."""

    @classmethod
    def exercise(cls, component: Any) -> Any:
        return [cls.picked(component, range(cls.picks), tasks) for tasks in (cls.tasks(cls.num_tasks), cls.tasks(1))]

    @classmethod
    def tasks(cls, count: int) -> list[Task]:
        """Return `count` tasks with the suite's columns."""
        return [
            Task(str(n), f"task {n}", metadata={name: values[n % len(values)] for name, values in cls.columns.items()})
            for n in range(count)
        ]

    @classmethod
    def picked(cls, sampler: Any, groups: Iterable[int], tasks: Sequence[Task] = ()) -> list[int]:
        """Pick a task for each group and report the group's rewards after each pick; return the picked indices.

        Of some tasks all samples are solved (reward 1), of others some or none.
        """
        tasks = tasks or cls.tasks(cls.num_tasks)
        sampler.open(tasks)
        indices = []
        for group in groups:
            index = sampler.pick(group, len(tasks), SEED)
            sampler.learned(group, index, [float(index % 2), float(index % 3 == 0)])
            indices.append(index)
        return indices

    def test_every_pick_is_a_task(self, made: Any) -> None:
        for index in self.picked(made, range(self.picks)):
            assert isinstance(index, int) and 0 <= index < self.num_tasks, (
                f"pick() returned {index!r}; return an index below num_tasks = {self.num_tasks}"
            )

    def test_another_instance_continues_from_its_state(self, made: Any) -> None:
        half = self.picks // 2
        self.picked(made, range(half))
        state = json.loads(json.dumps(made.state()))
        other = self.make()
        other.load(state)
        rest = range(half, self.picks)
        assert self.picked(other, rest) == self.picked(made, rest), (
            "a new instance picked other tasks after load(state()); the state is incomplete"
        )

    def test_a_group_may_end_without_rewards(self, made: Any) -> None:
        made.learned(0, made.pick(0, self.num_tasks, SEED), [])
