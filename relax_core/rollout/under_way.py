# SPDX-License-Identifier: Apache-2.0
"""A group while it is generated: the oldest weights among its tokens, and how many tokens each attempt has so far.

Every turn of every attempt passes here, so that none goes on with weights older than its group's floor, and the length
of what has to be given up is known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from relax_core.api.batch import AttemptId
from relax_core.rollout.completion import Completion, Generate, GenerateCall


class GroupUnderWay:
    """What was sampled for one issue of a group."""

    def __init__(self, granted: int) -> None:
        self._granted = granted
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

    def generator(self, attempt: AttemptId, generate: Generate) -> Generate:
        """`generate` for one attempt of the group."""
        turns = self._turns.setdefault(attempt, [])

        async def counted(call: GenerateCall) -> Completion:
            turn = len(turns)
            turns.append(0)

            def watch(tokens: Sequence[int]) -> bool:
                turns[turn] = len(tokens)
                return call.watch is not None and call.watch(tokens)

            completion = await generate(replace(call, floor=self.floor, watch=watch))
            turns[turn] = len(completion.tokens)
            self._sampled(completion)
            return completion

        return counted

    def _sampled(self, completion: Completion) -> None:
        found = [*completion.versions, *completion.oldest_cache]
        if found:
            self._oldest = min(found) if self._oldest is None else min(self._oldest, *found)
