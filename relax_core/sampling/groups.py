# SPDX-License-Identifier: Apache-2.0
"""Groups of a run: the choice of a group's task, the group's state while it is in flight, and the filters.

A rejected group is dropped under its filter's name, and another group is issued in its place. Too many rejections in a
row end the run with their reasons. Generating and scoring groups is the work of `rollout_worker`.
"""

from __future__ import annotations

import json
import math
import random
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol, overload

from relax_core.api.algorithm import Source
from relax_core.api.batch import AttemptId
from relax_core.api.bus import Bus, Issue
from relax_core.api.errors import ConfigError, RelaxError
from relax_core.api.options import Options
from relax_core.api.source import Filter, Sampler
from relax_core.api.task import Task
from relax_core.api.trajectory import Trajectory
from relax_core.api.weights import Version
from relax_core.data.tasks import RowSet
from relax_core.engines.pool import EnginePool
from relax_core.engines.requests import PendingRequest
from relax_core.registry.error_text import authored
from relax_core.registry.shapes import WrongShape, checked, returned_by, shown
from relax_core.rewards.host import ScoredSample

SHOWN = 3
"""Number of groups that `relax why` shows."""
TOO_LONG = "too-long"
"""Filter name under which a group is dropped if its prompt, including media, is too long."""
REMEMBERED = 1 << 16
"""Number of groups whose tasks are remembered in case a group is issued again; far more than are ever in flight."""
STORED = 1 << 12
"""Largest number of groups whose tasks are stored on the bus if some of them are trained already."""
KEPT, FORMERLY_KEPT = "selection", "sampler"
"""Names under which the bus stores the picks of a run, and the sampler's state alone in runs of earlier versions."""


class Turns(Protocol):
    """The turns of samples that are played together: of a group, a prelaunched group, or a task of an evaluation.

    `place` is the index of a sample among them.
    """

    def sample_started(self, place: int) -> None:
        """Forget the turns of an earlier play of this sample."""

    async def generate(self, requests: Sequence[PendingRequest]) -> None:
        """Sample turns as one batch, each of the sample at the request's `place`; return when all have ended."""

    def sample_ended(self) -> None: ...


@dataclass(slots=True, eq=False)
class InflightGroup:
    """One issue of a group, from its admission until it is scored.

        issued -> generating -> generated -> scoring -> scored -> put on the bus | rejected by a filter

    Invariants:
    - Every turn goes through `generate`, so an engine with weights older than the group's floor never continues it.
    - `lengths` always counts the tokens that would be lost with the group.
    - `trajectories` and `scores` are empty, or hold one entry per attempt of the issue, in its order.
    """

    issue: Issue
    task: Task
    version: Version
    """Newest weights of the engines when the group was admitted."""
    pool: EnginePool
    since: float = 0.0
    """Time on the run's clock at which generation started, in seconds."""
    trajectories: tuple[Trajectory, ...] = ()
    seconds: float = 0.0
    """Seconds from `since` until all samples ended."""
    reward_s: float = 0.0
    """Seconds that scoring took, for all groups that were scored together."""
    unfit: str = ""
    """Reason why the task cannot be trained on, or empty. With a reason, the group is dropped like a rejected group."""
    scoring: bool = False
    scores: tuple[ScoredSample, ...] = ()
    rejected_by: str = ""
    """Name of the filter that rejected the group; empty if no filter did."""
    reason: str = ""
    """Reason that the filter gave for the rejection."""
    num_ended: int = 0
    """Number of samples that have ended."""
    at_engines: int = 0
    """Number of samples that wait for an engine; the remaining unfinished samples are in their environments."""
    _oldest: int | None = None
    """Oldest step of the weights that sampled the tokens so far. These weights are of one lineage."""
    _sampled: dict[int, int] = field(default_factory=dict)
    """Number of tokens in the ended turns of each sample that has started, by its place."""
    _asked: set[int] = field(default_factory=set)
    """Places of the samples that have sent a request to an engine."""
    _open: set[PendingRequest] = field(default_factory=set)
    """Turns in progress."""

    @property
    def lengths(self) -> Mapping[AttemptId, int]:
        """Number of tokens sampled so far, by attempt."""
        lengths = dict(self._sampled)
        for request in self._open:
            lengths[request.place] += len(request.tokens)
        return {self.issue.attempts[place]: length for place, length in lengths.items()}

    @property
    def samples(self) -> Iterator[tuple[AttemptId, Trajectory, ScoredSample]]:
        return zip(self.issue.attempts, self.trajectories, self.scores, strict=True)

    def sample_started(self, place: int) -> None:
        self._sampled[place] = 0
        self._asked.discard(place)

    async def generate(self, requests: Sequence[PendingRequest]) -> None:
        # Before the first token, the floor is the step of the engines when the group was admitted.
        floor = self.version.step if self._oldest is None else self._oldest
        group, attempts = self.issue.group, self.issue.attempts
        for request in requests:
            place = request.place
            request.group_floor, request.session, request.group = floor, attempts[place], group
            self._sampled.setdefault(place, 0)
            self._asked.add(place)
        self._open.update(requests)
        self.at_engines += len(requests)
        try:
            await self.pool.generate(requests)
        finally:
            self.at_engines -= len(requests)
            self._open.difference_update(requests)
            for request in requests:
                self._sampled[request.place] += len(request.tokens)
        for request in requests:
            if request.tokens:
                oldest = min(request.oldest_cache)
                self._oldest = oldest if self._oldest is None else min(self._oldest, oldest)

    @property
    def num_in_play(self) -> int:
        """Number of samples that have started and not ended."""
        return 0 if self.trajectories else len(self.issue.attempts) - self.num_ended

    @property
    def num_starting(self) -> int:
        """Number of samples in play that have sent no request to an engine yet: their environments are starting."""
        return 0 if self.trajectories else max(0, len(self.issue.attempts) - max(len(self._asked), self.num_ended))

    def sample_ended(self) -> None:
        self.num_ended += 1


def oldest(groups: Iterable[InflightGroup], now: float) -> list[dict[str, object]]:
    """Describe the oldest groups for `relax why`: age in seconds, size, unfinished samples, and what these wait for."""
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
    """The sampler of a run with a record of its picks, and the filters of the run with a count of recent rejections.

    Invariants:
    - Tasks are picked in the order of group numbers, once for each number below `_next`.
    - A group keeps its task while it is among the last `REMEMBERED` groups, also in a process that replaces this one:
      `keep` stores the state before the pick of group `_next` with the tasks of the groups that may be issued again.
    - `_in_a_row` counts rejections since the last kept group, by cause.
    """

    def __init__(
        self, sampler: Sampler, filters: Mapping[str, Filter], tasks: RowSet, train: Sequence[int], seed: int,
        refill_limit: int,
    ) -> None:  # fmt: skip
        """Open the sampler on the tasks `train`, which are indices into `tasks`.

        `refill_limit`: rejections in a row that end the run; 0 disables the limit.
        """
        self.sampler, self._filters, self._train = sampler, filters, train
        self._seed, self._limit = seed, refill_limit
        self._picked: OrderedDict[int, int] = OrderedDict()
        self._next: int | None = 0
        """Number of the group that is picked next; None: the first group that is asked for."""
        self._in_a_row: Counter[str] = Counter()
        with authored(f"sampler {type(sampler).__qualname__}"):
            sampler.open(_TrainingTasks(tasks, train))

    def task(self, group: int) -> int:
        """Return the index of the group's task; the same on every call."""
        following = group if self._next is None else self._next
        for number in () if group in self._picked else range(min(following, group), group + 1):
            self._picked[number] = picked(self.sampler, number, len(self._train), self._seed)
            if len(self._picked) > REMEMBERED:
                self._picked.popitem(last=False)
        self._next = max(following, group + 1)
        return self._train[self._picked[group]]

    def take(self, groups: Sequence[InflightGroup]) -> None:
        """Pass the rewards of scored groups to the sampler, then record in each group the first filter that rejects it.

        Raises RelaxError after `refill_limit` rejections in a row.
        """
        for group in groups:
            number = group.issue.group
            rewards = [scored.value for scored in group.scores if scored.outcome.judged]
            with authored(f"sampler {type(self.sampler).__qualname__}"):
                self.sampler.learned(number, self._picked[number], rewards)
        for group in groups:
            if group.unfit:
                group.rejected_by, group.reason = TOO_LONG, group.unfit
            else:
                rewards = [scored.value if scored.outcome.judged else math.nan for scored in group.scores]
                for name, rule in self._filters.items():
                    with authored(f"filter {name}"):
                        reason = rule.reject(group.task, group.issue.attempts, group.trajectories, rewards)
                        checked(reason, str | None, returned_by(rule.reject))
                    if reason:
                        group.rejected_by, group.reason = name, reason
                        break
            if not group.rejected_by:
                self._in_a_row.clear()
                continue
            self._in_a_row[f"{group.rejected_by} ({group.reason})"] += 1
            if self._limit and self._in_a_row.total() >= self._limit:
                causes = ", ".join(f"{cause}: {count}" for cause, count in self._in_a_row.most_common(4))
                raise RelaxError(
                    f"filters: rejected the last {self._in_a_row.total()} groups ({causes}); choose tasks that suit "
                    "the policy, different filters, or a larger rollout.refill_limit"
                )

    async def keep(self, bus: Bus) -> None:
        """Store the picks and the sampler's state of this moment on the bus, and so in checkpoints.

        Raises PluginError if the state is not JSON data.
        """
        known = await bus.statistics()
        following = self._next or 0
        first = known["oldest_group"] if following - known["oldest_group"] <= STORED else known["oldest_open"]
        tasks = {str(group): self._picked[group] for group in range(first, following) if group in self._picked}
        with authored(f"sampler {type(self.sampler).__qualname__}"):
            state = checked(self.sampler.state(), Mapping[str, Any], returned_by(self.sampler.state))
            kept = {"next": self._next, "tasks": tasks, "state": json.loads(json.dumps(dict(state)))}
        await bus.keep(KEPT, kept)

    async def restore(self, bus: Bus) -> None:
        """Restore the picks and the sampler's state that `keep` stored last, before a resume or in a former process."""
        kept = await bus.kept(KEPT)
        if kept is None:  # the run has just begun, or an earlier version of relax stored the sampler's state alone
            self._next = None if (await bus.version()).step else 0
            kept = {"tasks": {}, "state": await bus.kept(FORMERLY_KEPT)}
        else:
            self._next = kept["next"]
        self._picked.update((int(group), task) for group, task in kept["tasks"].items())
        if kept["state"]:
            with authored(f"sampler {type(self.sampler).__qualname__}"):
                self.sampler.load(kept["state"])


def picked(sampler: Sampler, group: int, num_tasks: int, seed: int) -> int:
    """Return the index of the task that a sampler picks. Raises PluginError for a value that is not such an index."""
    with authored(f"sampler {type(sampler).__qualname__}"):
        index = sampler.pick(group, num_tasks, seed)
        checked(index, int, returned_by(sampler.pick))
        if not 0 <= index < num_tasks:
            raise WrongShape(
                f"{returned_by(sampler.pick)}: got {shown(index)}; want an index from 0 to {num_tasks - 1}"
            )
        return int(index)


class _TrainingTasks(Sequence[Task]):
    """The training tasks as a sequence; a task is read from its file on access."""

    def __init__(self, tasks: RowSet, numbers: Sequence[int]) -> None:
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
    """Shuffle the tasks anew in each epoch; False keeps the order of the file."""


class Shuffle(Sampler[ShuffleOptions]):
    """Shuffled epochs over the tasks. The task depends only on seed and group number, so a resumed run can continue."""

    def pick(self, group: int, num_tasks: int, seed: int) -> int:
        epoch, place = divmod(group, num_tasks)
        return _order(seed, epoch, num_tasks)[place] if self.options.shuffle else place


def make_sampler(run: Any, build: Callable[..., Any], source: Source) -> Sampler:
    """Build the run's sampler, which `Selection` opens; without `data.shuffle`, the order of the file.

    Raises ConfigError for a sampler that learns from rewards if the run trains on a dataset.
    """
    if not run.data.shuffle:
        return Shuffle(ShuffleOptions(shuffle=False))
    sampler: Sampler = build(run.sampler.chosen, Sampler)
    if source is not Source.ROLLOUT and type(sampler).learned is not Sampler.learned:
        fix = "it learns from rewards, and the rows of a dataset have none: choose a sampler that does not, or shuffle"
        raise ConfigError("sampler.name", run.sampler.name, fix)
    return sampler


@lru_cache(maxsize=4)  # for two task sets, each with groups of two epochs in flight when an epoch ends
def _order(seed: int, epoch: int, num_tasks: int) -> array[int]:
    order = array("q", range(num_tasks))
    random.Random(f"shuffle {seed} {epoch}").shuffle(order)
    return order
