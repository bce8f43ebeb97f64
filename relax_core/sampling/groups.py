# SPDX-License-Identifier: Apache-2.0
"""Groups of a run: the task that each gets, its state from its admission to the bus, and which are trained on.

A rejected group is dropped under its filter's name and others are issued in its place; where nothing but rejections
come, the run ends with the reasons instead of generating for ever. Who generates and scores a group is elsewhere.
"""

from __future__ import annotations

import math
import random
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, overload

from relax_core.api.batch import AttemptId
from relax_core.api.bus import Issue
from relax_core.api.errors import RelaxError
from relax_core.api.options import Options
from relax_core.api.source import Filter, Sampler
from relax_core.api.task import Task
from relax_core.api.trajectory import Trajectory
from relax_core.api.weights import Version
from relax_core.data.tasks import TaskSet
from relax_core.engines.requests import Completion, GenerateAll, GenerateCall, Watch
from relax_core.rewards.scorer import ScoredSample

SHOWN = 3
"""Groups that `relax why` shows."""
TOO_LONG = "too-long"
"""The name that rejects groups whose prompt is too long with its media, which only their headers tell."""
REMEMBERED = 1 << 16
"""Groups whose task is known: far more than are ever under way. One that is issued again keeps its task."""


@dataclass(slots=True, eq=False)
class InflightGroup:
    """One issue of a group.

        issued -> generating -> generated -> scoring -> scored -> put on the bus | rejected by a filter

    Invariants:
    - every turn of every attempt is asked through `generator`, so that no weights older than its oldest token go on with it;
    - `lengths` has at every moment the tokens that would be given up with the group;
    - `trajectories` and `scores` are empty, or one for each attempt of the issue in its order.
    """

    issue: Issue
    task: Task
    version: Version
    """Weights of the engines when it was admitted."""
    since: float = 0.0
    trajectories: tuple[Trajectory, ...] = ()
    seconds: float = 0.0
    """Time that its samples took."""
    reward_s: float = 0.0
    """Time until the rewards had judged it with those that were judged together."""
    unfit: str = ""
    """Why it was not generated, where its task can't be trained on: it is replaced like one that a filter rejects."""
    scoring: bool = False
    scores: tuple[ScoredSample, ...] = ()
    rejected_by: str = ""
    """The filter that drops the group."""
    reason: str = ""
    num_ended: int = 0
    """Samples that have ended."""
    at_engines: int = 0
    """Samples whose next tokens are awaited; the other missing ones are in their environments."""
    _oldest: int | None = None
    """Oldest step among the tokens so far, which are of one lineage: a rollback ends the other groups."""
    _turns: dict[AttemptId, list[int]] = field(default_factory=dict)
    """Tokens of each turn."""

    @property
    def lengths(self) -> Mapping[AttemptId, int]:
        """Tokens sampled so far for each attempt."""
        return {attempt: sum(turns) for attempt, turns in self._turns.items()}

    @property
    def samples(self) -> Iterator[tuple[AttemptId, Trajectory, ScoredSample]]:
        return zip(self.issue.attempts, self.trajectories, self.scores, strict=True)

    def generator(self, attempts: Sequence[AttemptId], generate: GenerateAll) -> GenerateAll:
        """Wrap `generate` for attempts of the group that begin, or begin again: a call each, as often as they take turns."""
        lengths: list[list[int]] = [[] for _ in attempts]
        self._turns.update(zip(attempts, lengths, strict=True))

        async def counted(calls: Sequence[GenerateCall]) -> Sequence[Completion]:
            # Before the first token, the floor is the step of the engines when the group was admitted.
            floor = self.version.step if self._oldest is None else self._oldest
            turns = [len(own) for own in lengths]
            watched = []
            for call, own, attempt in zip(calls, lengths, attempts, strict=True):
                own.append(0)
                watch = partial(_note_length, own, len(own) - 1, call.watch)
                watched.append(call._replace(floor=floor, session=attempt, group=self.issue.group, watch=watch))
            self.at_engines += len(calls)
            try:
                completions = await generate(watched)
            finally:
                self.at_engines -= len(calls)
            for completion, own, turn in zip(completions, lengths, turns, strict=True):
                own[turn] = len(completion.tokens)
                sampled = (*completion.versions, *completion.oldest_cache)
                if sampled:
                    self._oldest = min(sampled) if self._oldest is None else min(self._oldest, *sampled)
            return completions

        return counted

    @property
    def num_in_play(self) -> int:
        """Samples that are begun and have not ended."""
        return 0 if self.trajectories else len(self.issue.attempts) - self.num_ended

    @property
    def num_starting(self) -> int:
        """Samples in play that engines were not yet asked for: their environments start."""
        asked = sum(1 for turns in self._turns.values() if turns)
        return 0 if self.trajectories else max(0, len(self.issue.attempts) - max(asked, self.num_ended))

    def sample_ended(self) -> None:
        self.num_ended += 1


def oldest(groups: Iterable[InflightGroup], now: float) -> list[dict[str, Any]]:
    """Describe the groups that were begun first, for people: their age, the samples that are missing, who has them now."""
    shown = []
    for group in sorted(groups, key=lambda one: (one.since, one.issue.group))[:SHOWN]:
        size = len(group.issue.attempts)
        missing = 0 if group.trajectories else size - group.num_ended
        at = "engines" if group.at_engines else "environments"
        if not missing:
            at = "rewards" if group.scoring else "rollout"
        age = round(now - group.since, 3)
        shown.append({"group": group.issue.group, "for_s": age, "samples": size, "missing": missing, "at": at})
    return shown


class Selection:
    """A sampler with a memory of what it picked, and filters with counts of what they rejected.

    Invariants:
    - A group keeps its task while it is among the last `REMEMBERED`.
    - `_in_a_row` counts the causes of rejections since a group was kept.
    """

    def __init__(
        self, sampler: Sampler, filters: Mapping[str, Filter], tasks: TaskSet, train: Sequence[int], seed: int,
        refill_limit: int,
    ) -> None:  # fmt: skip
        """`train`: the tasks among `tasks` that are trained on. `refill_limit`: rejections in a row; 0: any number."""
        self.sampler, self._filters, self._train = sampler, filters, train
        self._seed, self._limit = seed, refill_limit
        self._picked: OrderedDict[int, int] = OrderedDict()
        self._in_a_row: Counter[str] = Counter()
        sampler.open(_TrainingTasks(tasks, train))

    def task(self, group: int) -> int:
        """Number of the group's task, the same however often it is asked."""
        if group not in self._picked:
            self._picked[group] = self.sampler.pick(group, len(self._train), self._seed)
            if len(self._picked) > REMEMBERED:
                self._picked.popitem(last=False)
        return self._train[self._picked[group]]

    def take(self, groups: Sequence[InflightGroup]) -> None:
        """Tell the sampler the rewards of scored groups, then note the first filter that rejects each, if one does.

        Raises where nothing but rejections come.
        """
        for group in groups:
            number = group.issue.group
            rewards = [scored.value for scored in group.scores if scored.outcome.judged]
            self.sampler.learned(number, self._picked[number], rewards)
        for group in groups:
            if group.unfit:
                group.rejected_by, group.reason = TOO_LONG, group.unfit
            else:
                rewards = [scored.value if scored.outcome.judged else math.nan for scored in group.scores]
                for name, rule in self._filters.items():
                    if reason := rule.reject(group.task, group.issue.attempts, group.trajectories, rewards):
                        group.rejected_by, group.reason = name, reason
                        break
            if not group.rejected_by:
                self._in_a_row.clear()
                continue
            self._in_a_row[f"{group.rejected_by} ({group.reason})"] += 1
            if self._limit and self._in_a_row.total() >= self._limit:
                causes = ", ".join(f"{cause}: {count}" for cause, count in self._in_a_row.most_common(4))
                raise RelaxError(
                    f"filters: rejected the last {self._in_a_row.total()} groups ({causes}); choose tasks that suit the "
                    "policy, other filters, or a larger rollout.refill_limit"
                )


class _TrainingTasks(Sequence[Task]):
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


def _note_length(lengths: list[int], turn: int, inner: Watch | None, tokens: Sequence[int]) -> bool:
    """Note the length of a turn while it is sampled, and do what else was wanted of its watch."""
    lengths[turn] = len(tokens)
    return inner is not None and inner(tokens)
