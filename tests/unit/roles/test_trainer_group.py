# SPDX-License-Identifier: Apache-2.0
"""Ranks live and die together: a failure of one ends the call of all, and says who it was."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import pytest

from relax_core.api.batch import Ragged, RowBatch
from relax_core.api.errors import DeadlineExceeded, InfrastructureError, WorkerDied
from relax_core.api.trainer import Chunk, ChunkPlan, UpdateOutcome, UpdateResult
from relax_core.roles.rank_group import MAX_OVERFLOWS, RankGroup, meeting_place
from relax_core.testing.trainer import make_rows
from tests.unit.roles.virtual_time import run_virtual

Answer = Callable[[], Any]


class Quiet:
    def span(self, kind: str, name: str, blocked_by: str = "") -> AbstractContextManager[None]:
        return nullcontext()

    def say(self, work: str) -> None:
        """Nobody listens."""


class Rank:
    """Answers after some seconds, fails, or waits in a collective until it is killed."""

    def __init__(self, number: int, seconds: float | None, outcome: Any = None) -> None:
        self.name, self.pid, self.host = f"rank-{number}", number, "127.0.0.1"
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
    group = RankGroup(None, ranks, [Quiet() for _ in ranks], {}, 0)  # type: ignore[arg-type]

    async def coroutine() -> list[Any]:
        async with asyncio.timeout(60):
            return await group.call("accumulate")

    return run_virtual(coroutine())  # type: ignore[no-any-return]


class Dealing:
    """A trainer that deals rows to its ranks in turns, a row a micro-batch, the last one first."""

    def plan(self, lengths: Sequence[int], world_size: int, tokens_per_micro_batch: int = 0) -> ChunkPlan:
        order = range(len(lengths))[::-1]
        return ChunkPlan(tuple(tuple((unit,) for unit in order[rank::world_size]) for rank in range(world_size)))


class Forward(Rank):
    """Answers a chunk with the first token of each of its own rows."""

    async def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        chunk: Chunk = args[0]
        own = [index for batch in chunk.plan.micro_batches[self.pid] for index in batch]
        first = [chunk.rows.columns["tokens"].values[chunk.rows.columns["tokens"].offsets()[index]] for index in own]
        ids = tuple(chunk.rows.ids[index] for index in own)
        return RowBatch(ids, {"log_probs": Ragged.of([np.array([token]) for token in first])})


def _group(*ranks: Rank) -> RankGroup:
    return RankGroup(Dealing(), ranks, [Quiet() for _ in ranks], {}, 0)  # type: ignore[arg-type]


def test_columns_come_back_in_the_order_of_the_rows_whoever_computed_them() -> None:
    rows, group = make_rows(), _group(Forward(0, 0), Forward(1, 0))
    (column,) = run_virtual(group.forward(rows, ("log_probs",))).values()
    tokens = rows.columns["tokens"]
    assert [int(value) for value in column.values] == [int(tokens.values[start]) for start in tokens.offsets()[:-1]]


def test_groups_stay_whole_where_the_loss_compares_their_rows() -> None:
    rows, group = make_rows(), _group(Rank(0, 0), Rank(1, 0))
    alone = [batch for rank in group.chunk(rows).plan.micro_batches for batch in rank]
    group._whole_groups = True
    whole = [batch for rank in group.chunk(rows).plan.micro_batches for batch in rank]
    assert {len(batch) for batch in alone} == {1} != {len(batch) for batch in whole}
    assert sorted(index for batch in whole for index in batch) == list(range(len(rows)))
    groups = [{rows.ids[index].group for index in batch} for batch in whole]
    assert sorted(group for (group,) in groups) == sorted({row.group for row in rows.ids})


DIED, LOST = WorkerDied("worker rank-1 ended with status -9"), InfrastructureError("rank 0 of 2 lost another rank")


@pytest.mark.parametrize(
    ("hosts", "place"),
    [
        (["10.0.0.1"], ""),
        (["10.0.0.1", "10.0.0.1"], "127.0.0.1:7001"),
        (["10.0.0.1", "10.0.0.2"], "10.0.0.1:7001"),
    ],
)
def test_ranks_meet_at_the_first_ones_machine_and_by_loopback_where_all_are_there(hosts: list[str], place: str) -> None:
    class Housed(Rank):
        async def free_port(self, address: str) -> int:
            assert address == place.rpartition(":")[0]
            return 7000 + self.pid

    ranks = [Housed(1 + number, 0) for number in range(len(hosts))]
    for rank, host in zip(ranks, hosts, strict=True):
        rank.host = host
    assert asyncio.run(meeting_place(ranks)) == place


@pytest.mark.parametrize("error", [DIED, ValueError("row 3 is empty")])
def test_a_failed_rank_ends_all_ranks(error: Exception) -> None:
    waiting, well = Rank(0, None), Rank(2, 1, "done")
    with pytest.raises(type(error), match=str(error)):
        called(waiting, Rank(1, 2, error), well)
    assert (waiting.killed, well.killed) == (True, True)


@pytest.mark.parametrize("cause", [DIED, ValueError("row 3 is empty")])
@pytest.mark.parametrize("first", [0.5, 1.5])
def test_the_cause_is_reported_whichever_rank_fails_first(cause: Exception, first: float) -> None:
    with pytest.raises(type(cause), match=str(cause)):
        called(Rank(0, first, LOST), Rank(1, 1, cause), Rank(2, 0.1, DeadlineExceeded("rank-2", "the others", 9)))


class Frozen(Rank):
    """A rank that was stopped: its work and its pings hang until somebody kills it."""

    async def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        if method != "ping":
            return await super().call(method, *args, timeout_s=timeout_s)
        await asyncio.sleep(timeout_s)
        raise DeadlineExceeded(self.name, method, timeout_s)


class Busy(Rank):
    """A rank that works, and answers pings meanwhile."""

    async def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        return None if method == "ping" else await super().call(method, *args, timeout_s=timeout_s)


def test_a_rank_that_hangs_alone_is_killed_and_named() -> None:
    waiting, frozen = Busy(0, None), Frozen(1, None)
    with pytest.raises(WorkerDied, match=r"rank-1 .* no sign of life for 15 s during accumulate"):
        called(waiting, frozen)
    assert (waiting.killed, frozen.killed) == (True, True)


def test_a_long_call_of_ranks_that_answer_is_left_alone_and_answers_come_in_their_order() -> None:
    assert called(Busy(0, 55, "a"), Busy(1, 50, "b")) == ["a", "b"]


class Scaled(Rank):
    """Overflows some times; notes what it is asked."""

    def __init__(self, overflows: int) -> None:
        super().__init__(0, 0)
        self.overflows, self.asked = overflows, list[tuple[str, Any]]()

    async def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        self.asked.append((method, args[0] if method != "accumulate" else len(args[0].rows)))
        if method != "finish_update":
            return None
        self.overflows -= 1
        return UpdateResult(UpdateOutcome.OVERFLOW if self.overflows >= 0 else UpdateOutcome.APPLIED)


class Plans:
    def plan(self, lengths: Sequence[int], world_size: int, tokens: int) -> ChunkPlan:
        return ChunkPlan(((tuple(range(len(lengths))),),))


def updated(rank: Scaled) -> tuple[UpdateResult, int]:
    group = RankGroup(Plans(), [rank], [Quiet()], {}, 0)  # type: ignore[arg-type, list-item]
    verified = 0

    async def verify() -> None:
        nonlocal verified
        verified += 1

    async def coroutine() -> UpdateResult:
        async with asyncio.timeout(60):
            await group.begin_update({"tokens": 9.0})
            await group.accumulate(make_rows(0, groups=1, size=3), 0, False)
            await group.accumulate(make_rows(1, groups=1, size=2), 0, True)
            return await group.finish_update({"tokens": 10.0}, verify)

    return run_virtual(coroutine()), verified  # type: ignore[return-value]


ALL_OF_IT = [
    ("begin_update", {"tokens": 10.0}),
    ("accumulate", 3),
    ("accumulate", 2),
    ("finish_update", {"tokens": 10.0}),
]


def test_an_update_that_overflows_is_computed_again_under_leases_that_hold() -> None:
    rank = Scaled(2)
    result, verified = updated(rank)
    assert result.outcome is UpdateOutcome.APPLIED
    assert result.metrics["train/overflows"] == (2.0, 1.0)
    assert rank.asked[4:] == ALL_OF_IT * 2
    assert verified == 2


def test_an_update_that_overflows_at_every_scale_ends() -> None:
    rank = Scaled(1000)
    assert updated(rank)[0].outcome is UpdateOutcome.OVERFLOW
    assert len(rank.asked) == 4 * (MAX_OVERFLOWS + 1)
