# SPDX-License-Identifier: Apache-2.0
"""Where the groups of a rollout stand: how old, how many of their samples are missing, and who has them now.

Only for people (`relax why`); nothing is decided by it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from relax_core.api.clock import Clock
from relax_core.rollout.completion import Completion, GenerateAll, GenerateCall

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
