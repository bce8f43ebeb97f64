# SPDX-License-Identifier: Apache-2.0
"""A group under way: one object from its admission to the bus. Its state is data; who generates and scores it is elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from relax_core.api.batch import AttemptId
from relax_core.api.bus import Issue
from relax_core.api.task import Task
from relax_core.api.trajectory import Trajectory
from relax_core.api.weights import Version
from relax_core.engines.requests import Completion, GenerateAll, GenerateCall, Watch
from relax_core.rewards.scorer import ScoredSample

SHOWN = 3
"""Groups that `relax why` shows."""


@dataclass(slots=True, eq=False)
class InflightGroup:
    """One issue of a group.

        issued -> generating -> generated -> scoring -> scored -> put on the bus | rejected by a filter

    Invariants:
    - every turn of every attempt is asked through `generator`, so that none goes on with weights older than `floor`;
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
    _turns: dict[AttemptId, list[int]] = field(default_factory=dict)
    """Tokens of each turn."""

    @property
    def floor(self) -> int:
        """Oldest step among the tokens so far; before the first, that of the engines when the group was admitted."""
        return self.version.step if self._oldest is None else self._oldest

    @property
    def lengths(self) -> Mapping[AttemptId, int]:
        """Tokens sampled so far for each attempt."""
        return {attempt: sum(turns) for attempt, turns in self._turns.items()}

    @property
    def samples(self) -> Iterator[tuple[AttemptId, Trajectory, ScoredSample]]:
        return zip(self.issue.attempts, self.trajectories, self.scores, strict=True)

    def generator(self, attempts: Sequence[AttemptId], generate: GenerateAll) -> GenerateAll:
        """Wrap `generate` for attempts of the group: a call each, as often as they take turns."""
        lengths = [self._turns.setdefault(attempt, []) for attempt in attempts]

        async def counted(calls: Sequence[GenerateCall]) -> Sequence[Completion]:
            floor, turns = self.floor, [len(own) for own in lengths]
            watched = []
            for call, own, attempt in zip(calls, lengths, attempts, strict=True):
                own.append(0)
                watch = _watch(own, len(own) - 1, call.watch)
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

    def sample_ended(self) -> None:
        self.num_ended += 1

    def progress(self, now: float) -> dict[str, Any]:
        """Plain data for people: how old it is, how many samples are missing, and who has them now."""
        size = len(self.issue.attempts)
        missing = 0 if self.trajectories else size - self.num_ended
        at = "engines" if self.at_engines else "environments"
        if not missing:
            at = "rewards" if self.scoring else "rollout"
        age = round(now - self.since, 3)
        return {"group": self.issue.group, "for_s": age, "samples": size, "missing": missing, "at": at}


def oldest(groups: Iterable[InflightGroup], now: float) -> list[dict[str, Any]]:
    """Progress of the groups that were begun first."""
    return [group.progress(now) for group in sorted(groups, key=lambda one: (one.since, one.issue.group))[:SHOWN]]


def _watch(lengths: list[int], turn: int, inner: Watch | None) -> Watch:
    """Note the length of a turn while it is sampled, and do what else was wanted of its watch."""

    def watch(tokens: Sequence[int]) -> bool:
        lengths[turn] = len(tokens)
        return inner is not None and inner(tokens)

    return watch
