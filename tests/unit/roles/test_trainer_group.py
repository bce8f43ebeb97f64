# SPDX-License-Identifier: Apache-2.0
"""Ranks live and die together: a failure of one ends the call of all, and says who it was."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest

from relax_core.api.errors import DeadlineExceeded, InfrastructureError, WorkerDied
from relax_core.roles.trainer_group import TrainerGroup
from tests.unit.roles.virtual_time import play

Answer = Callable[[], Any]


class Quiet:
    def span(self, kind: str, name: str, owed_by: str = "") -> AbstractContextManager[None]:
        return nullcontext()

    def say(self, work: str) -> None:
        """Nobody listens."""


class Rank:
    """Answers after some seconds, fails, or waits in a collective until it is killed."""

    def __init__(self, number: int, seconds: float | None, outcome: Any = None) -> None:
        self.name, self.pid = f"rank-{number}", number
        self._seconds, self._outcome, self.killed = seconds, outcome, False

    async def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        while self._seconds is None and not self.killed:
            await asyncio.sleep(1)
        await asyncio.sleep(self._seconds or 0)
        if self.killed:
            raise WorkerDied(f"worker {self.name} was killed")
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._outcome

    async def kill(self) -> None:
        self.killed = True


def called(*ranks: Rank) -> list[Any]:
    group = TrainerGroup(None, ranks, [Quiet() for _ in ranks], {}, 0)  # type: ignore[arg-type]

    async def scene() -> list[Any]:
        async with asyncio.timeout(60):
            return await group.call("accumulate")

    return play(scene())  # type: ignore[no-any-return]


DIED, LOST = WorkerDied("worker rank-1 ended with status -9"), InfrastructureError("rank 0 of 2 lost another rank")


def test_answers_come_in_the_order_of_the_ranks() -> None:
    assert called(Rank(0, 9, "a"), Rank(1, 1, "b")) == ["a", "b"]


@pytest.mark.parametrize("error", [DIED, ValueError("row 3 is empty")])
def test_who_waits_for_a_rank_that_failed_is_killed(error: Exception) -> None:
    waiting, well = Rank(0, None), Rank(2, 1, "done")
    with pytest.raises(type(error), match=str(error)):
        called(waiting, Rank(1, 2, error), well)
    assert (waiting.killed, well.killed) == (True, False)


@pytest.mark.parametrize("cause", [DIED, ValueError("row 3 is empty")])
@pytest.mark.parametrize("first", [0.5, 1.5])
def test_the_cause_is_told_whoever_speaks_first(cause: Exception, first: float) -> None:
    with pytest.raises(type(cause), match=str(cause)):
        called(Rank(0, first, LOST), Rank(1, 1, cause), Rank(2, 0.1, DeadlineExceeded("rank-2", "the others", 9)))
