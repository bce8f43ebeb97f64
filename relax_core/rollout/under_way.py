# SPDX-License-Identifier: Apache-2.0
"""A group while it is generated: the oldest weights among its tokens, and how many tokens each attempt has so far.

Every turn of every attempt passes here, so that none goes on with weights older than its group's floor, and the length
of what has to be given up is known.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from relax_core.api.batch import AttemptId
from relax_core.rollout.completion import Completion, GenerateAll, GenerateCall, Watch


class GroupUnderWay:
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
