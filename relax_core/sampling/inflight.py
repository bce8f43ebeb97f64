# SPDX-License-Identifier: Apache-2.0
"""A group while it is generated: the oldest weights among its tokens, and how many tokens each attempt has so far.

Every turn of every attempt passes here, so that none goes on with weights older than its group's floor, and the length
of what has to be given up is known.

Where the groups of a rollout stand: how old, how many of their samples are missing, and who has them now.

Only for people (`relax why`); nothing is decided by it.

Groups on their way from the engines to the bus: finished, then judged. Data only.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from relax_core.api.batch import AttemptId
from relax_core.api.bus import Issue
from relax_core.api.clock import Clock
from relax_core.api.task import Task
from relax_core.api.trajectory import Trajectory
from relax_core.api.weights import Version
from relax_core.engines.requests import Completion, GenerateAll, GenerateCall, Watch
from relax_core.rewards.scorer import ScoredSample


class InflightGroup:
    """What was sampled for one issue of a group."""

    def __init__(self, granted: int, group: Hashable = None) -> None:
        self._granted, self._group = granted, group
        self._oldest: int | None = None
        self._turns: dict[AttemptId, list[int]] = {}
        """Tokens of each turn."""

    @property
    def floor(self) -> int:
        """Oldest step among the tokens so far; before the first, that of the engines when the group was admitted."""
        return self._granted if self._oldest is None else self._oldest

    @property
    def lengths(self) -> Mapping[AttemptId, int]:
        """Tokens sampled for each attempt."""
        return {attempt: sum(turns) for attempt, turns in self._turns.items()}

    def generator(self, attempts: Sequence[AttemptId], generate: GenerateAll) -> GenerateAll:
        """`generate` for attempts of the group: a call each, as often as they take turns."""
        lengths = [self._turns.setdefault(attempt, []) for attempt in attempts]

        async def counted(calls: Sequence[GenerateCall]) -> Sequence[Completion]:
            floor, turns = self.floor, [len(own) for own in lengths]
            watched = []
            for call, own, attempt in zip(calls, lengths, attempts, strict=True):
                own.append(0)
                watch = _watch(own, len(own) - 1, call.watch)
                watched.append(call._replace(floor=floor, session=attempt, group=self._group, watch=watch))
            completions = await generate(watched)
            for completion, own, turn in zip(completions, lengths, turns, strict=True):
                own[turn] = len(completion.tokens)
                self._sampled(completion)
            return completions

        return counted

    def _sampled(self, completion: Completion) -> None:
        found = min((*completion.versions, *completion.oldest_cache), default=None)
        if found is not None and (self._oldest is None or found < self._oldest):
            self._oldest = found


def _watch(lengths: list[int], turn: int, inner: Watch | None) -> Watch:
    """Notes the length of a turn, and does what else was wanted of its watch."""

    def watch(tokens: Sequence[int]) -> bool:
        lengths[turn] = len(tokens)
        return inner is not None and inner(tokens)

    return watch


SHOWN = 3


@dataclass(slots=True, eq=False)
class GroupProgress:
    """One group, from its first request to its rewards."""

    group: int
    since: float
    missing: int
    samples: int
    at_engines: int = 0
    """Samples whose next tokens are awaited; the other missing ones are in their environments."""
    judging: bool = False

    def generator(self, generate: GenerateAll) -> GenerateAll:
        """`generate` for samples of the group."""

        async def counted(calls: Sequence[GenerateCall]) -> Sequence[Completion]:
            self.at_engines += len(calls)
            try:
                return await generate(calls)
            finally:
                self.at_engines -= len(calls)

        return counted

    def made(self) -> None:
        """A sample of the group is missing no longer."""
        self.missing -= 1

    @property
    def place(self) -> str:
        if not self.missing:
            return "rewards" if self.judging else "rollout"
        return "engines" if self.at_engines else "environments"


class Progress:
    """All groups that are begun and not yet judged."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._groups: dict[int, GroupProgress] = {}

    @contextmanager
    def making(self, group: int, samples: int) -> Iterator[GroupProgress]:
        """A group is generated; one that was given up is forgotten, the others wait for their rewards."""
        own = self._groups[group] = GroupProgress(group, self._clock.now(), samples, samples)
        try:
            yield own
        except BaseException:
            self._end(own)
            raise
        own.missing = 0

    @contextmanager
    def judging(self, groups: Sequence[int]) -> Iterator[None]:
        """Groups get their rewards; then they are the bus's."""
        own = [self._groups[group] for group in groups if group in self._groups]
        for one in own:
            one.judging = True
        try:
            yield
        finally:
            for one in own:
                self._end(one)

    def oldest(self, most: int = SHOWN) -> list[dict[str, Any]]:
        """Plain data of the groups that were begun first."""
        now = self._clock.now()
        groups = sorted(self._groups.values(), key=lambda one: (one.since, one.group))
        return [
            {"group": one.group, "for_s": round(now - one.since, 3), "samples": one.samples, "missing": one.missing,
             "at": one.place}
            for one in groups[:most]
        ]  # fmt: skip

    def _end(self, own: GroupProgress) -> None:
        if self._groups.get(own.group) is own:
            del self._groups[own.group]


@dataclass(frozen=True, slots=True)
class FinishedGroup:
    """A group whose samples have ended, however they did."""

    issue: Issue
    task: Task
    trajectories: tuple[Trajectory, ...]
    version: Version
    """Of the engines when it was admitted."""
    seconds: float
    unfit: str = ""
    """Why it was not generated, where its task can't be trained on: it is replaced like one that a filter rejects."""


@dataclass(frozen=True, slots=True)
class JudgedGroup:
    """And what each sample is worth."""

    group: FinishedGroup
    judgements: tuple[ScoredSample, ...]
    rejected_by: str = ""
    """The filter that drops the group."""
    reason: str = ""

    @property
    def samples(self) -> Iterator[tuple[AttemptId, Trajectory, ScoredSample]]:
        return zip(self.group.issue.attempts, self.group.trajectories, self.judgements, strict=True)
