# SPDX-License-Identifier: Apache-2.0
"""Which task a group gets, and which finished groups are trained on: the sampler and the filters of a run.

A rejected group is dropped under its filter's name and others are issued in its place; where nothing but rejections
come, the run ends with the reasons instead of generating for ever.

The `shuffle` sampler: every task once an epoch, in an order that depends on seed and epoch alone.
"""

from __future__ import annotations

import math
import random
from array import array
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, overload

from relax_core.api.errors import RelaxError
from relax_core.api.options import Options
from relax_core.api.source import Filter, Sampler
from relax_core.api.task import Task
from relax_core.data.tasks import TaskSet
from relax_core.sampling.inflight import InflightGroup

TOO_LONG = "too-long"
"""The name that rejects groups whose prompt is too long with its media, which only their headers tell."""
REMEMBERED = 1 << 16
"""Groups whose task is known: far more than are ever under way. One that is issued again keeps its task."""


class Selection:
    """A sampler with a memory of what it picked, and filters with counts of what they rejected."""

    def __init__(
        self, sampler: Sampler, filters: Mapping[str, Filter], tasks: TaskSet, train: Sequence[int], seed: int,
        refill_limit: int,
    ) -> None:  # fmt: skip
        """`train`: the tasks among `tasks` that are trained on. `refill_limit`: rejections in a row; 0: any number."""
        self._sampler, self._filters, self._train = sampler, filters, train
        self._seed, self._limit = seed, refill_limit
        self._picked: OrderedDict[int, int] = OrderedDict()
        self._in_a_row: Counter[str] = Counter()
        sampler.open(_Chosen(tasks, train))

    def task(self, group: int) -> int:
        """Number of the group's task, the same however often it is asked."""
        if group not in self._picked:
            self._picked[group] = self._sampler.pick(group, len(self._train), self._seed)
            if len(self._picked) > REMEMBERED:
                self._picked.popitem(last=False)
        return self._train[self._picked[group]]

    def learned(self, group: InflightGroup) -> None:
        """Tell the sampler the rewards of a group's samples."""
        number = group.issue.group
        rewards = [scored.value for scored in group.scores if scored.outcome.judged]
        self._sampler.learned(number, self._picked[number], rewards)

    def filter(self, group: InflightGroup) -> None:
        """Note the first filter that rejects a group, if one does. Raises where nothing but rejections come."""
        if group.unfit:
            group.rejected_by, group.reason = TOO_LONG, group.unfit
        else:
            rewards = [scored.value if scored.outcome.judged else math.nan for scored in group.scores]
            for name, rule in self._filters.items():
                if reason := rule.reject(group.task, group.issue.attempts, group.trajectories, rewards):
                    group.rejected_by, group.reason = name, reason
                    break
            else:
                self._in_a_row.clear()
                return
        self._count(f"{group.rejected_by} ({group.reason})")

    def _count(self, cause: str) -> None:
        self._in_a_row[cause] += 1
        if self._limit and self._in_a_row.total() >= self._limit:
            causes = ", ".join(f"{cause}: {count}" for cause, count in self._in_a_row.most_common(4))
            raise RelaxError(
                f"filters: rejected the last {self._in_a_row.total()} groups ({causes}); choose tasks that suit the policy, "
                "other filters, or a larger rollout.refill_limit"
            )

    def state(self) -> Mapping[str, Any]:
        """State that the sampler has learned."""
        return self._sampler.state()

    def load(self, state: Mapping[str, Any]) -> None:
        self._sampler.load(state)


class _Chosen(Sequence[Task]):
    """The tasks that are trained on, read when looked at."""

    def __init__(self, tasks: TaskSet, numbers: Sequence[int]) -> None:
        self._tasks, self._numbers = tasks, numbers

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Task]: ...
    def __getitem__(self, index: int | slice) -> Task | Sequence[Task]:
        numbers = self._numbers[index]
        return self._tasks[numbers] if isinstance(numbers, int) else [self._tasks[number] for number in numbers]


class ShuffleOptions(Options):
    shuffle: bool = True
    """False: the order of the file, every epoch."""


class Shuffle(Sampler[ShuffleOptions]):
    """A pure function of the group's issue number; it keeps no state, so a resumed run continues by number."""

    def pick(self, group: int, num_tasks: int, seed: int) -> int:
        epoch, place = divmod(group, num_tasks)
        return _order(seed, epoch, num_tasks)[place] if self.options.shuffle else place


@lru_cache(maxsize=4)  # groups of two epochs are in flight at their border, for training and for a second task set
def _order(seed: int, epoch: int, num_tasks: int) -> array[int]:
    order = array("q", range(num_tasks))
    random.Random(f"shuffle {seed} {epoch}").shuffle(order)
    return order
