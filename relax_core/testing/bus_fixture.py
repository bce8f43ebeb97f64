# SPDX-License-Identifier: Apache-2.0
"""A run around a bus, for its conformance suite: a producer, a role that credits, a trainer. Rows name their sample."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from relax_core.api.batch import AttemptId, Ragged, RowBatch, RowId
from relax_core.api.bus import Bus, BusSettings, Claim, ClaimRequest, Issue, Sealed
from relax_core.api.trajectory import Outcome
from relax_core.api.weights import Version

WAIT_S = 60.0
"""Longest wait for something that must come."""
SHORT_S = 0.05
"""How long a call waits that must come back empty-handed."""
FIRST = ("tokens", "rewards")
START = Version("actor", 0, 0)
SETTINGS = BusSettings(group_size=2, groups_per_step=2, max_staleness=1, columns=("tokens", "advantages"))


Scenario = Callable[["BusFixture"], Awaitable[Any]]
Open = Callable[[BusSettings, str, Version], Awaitable[Bus]]


@dataclass(slots=True)
class BusFixture:
    """One open bus and what the producer at it knows."""

    bus: Bus
    held: set[AttemptId] = field(default_factory=set)
    admitted: int = 0

    async def admit(self, limit: int = 2, wait_s: float = WAIT_S) -> tuple[Issue, ...]:
        """Admit groups that an engine with the newest weights may start."""
        issues = await self.bus.admit("rollout", await self.bus.version(), limit, wait_s)
        self.admitted += sum(len(issue.attempts) for issue in issues)
        self.held.update(attempt for issue in issues for attempt in issue.attempts)
        return issues

    async def put(
        self, attempts: Sequence[AttemptId], rows: int = 1, wait_s: float = WAIT_S, step: int | None = None
    ) -> bool:
        """Finish samples: each with `rows` rows, sampled by the newest weights or those of `step`."""
        tokens, version = 4, await self.bus.version()
        step, newest = (version.step, {version.incarnation: version.step}) if step is None else (step, {0: step})
        ids = tuple(RowId(*attempt, row) for attempt in attempts for row in range(rows))
        sealed = [Sealed(a, rows, Outcome.FINISHED, 1.0, step, tokens if rows else 0, newest=newest) for a in attempts]
        stored = await self.bus.put(RowBatch(ids, columns(ids, tokens)), sealed, wait_s)
        if stored:
            self.held.difference_update(attempts)
        return stored

    async def fail(self, attempt: AttemptId, outcome: Outcome = Outcome.REWARD_TIMEOUT) -> None:
        """End a sample without a verdict."""
        await self.bus.put(RowBatch((), columns((), 1)), [Sealed(attempt, 0, outcome)], WAIT_S)
        self.held.discard(attempt)

    async def produce(self, groups: int = 2) -> tuple[Issue, ...]:
        """Put so many whole groups on the bus, group by group."""
        issues = await self.admit(groups)
        for issue in issues:
            await self.put(issue.attempts)
        return issues

    async def claim(self, task: str = "advantages", groups: int = 1, needs: Sequence[str] = FIRST) -> Claim:
        """Claim rows that must be there for a task."""
        return await self._claimed(ClaimRequest(task, tuple(needs), groups))

    async def nothing_for(self, task: str) -> bool:
        """Tell whether a task gets no rows now."""
        return await self.bus.claim(ClaimRequest(task, FIRST, 1), SHORT_S) is None

    async def credit(self) -> Claim:
        """Claim, fill advantages, acknowledge; each row's advantage is its group number."""
        claim = await self.claim(groups=8)
        await self.bus.write(claim, {"advantages": by_row(claim.rows)})
        await self.bus.acknowledge(claim)
        return claim

    async def claim_step(self, overdue: bool = False) -> Claim:
        """Claim the actor's groups for its next step, which must be there."""
        return await self._claimed(await self.step_request(overdue))

    async def _claimed(self, request: ClaimRequest) -> Claim:
        claim = await self.bus.claim(request, WAIT_S)
        assert claim is not None, f"rows that are ready were not handed out within {WAIT_S:g} s"
        return claim

    async def step_waits(self) -> bool:
        """Tell whether the actor gets nothing for its next step now."""
        return await self.bus.claim(await self.step_request(False), SHORT_S) is None

    async def step_request(self, overdue: bool) -> ClaimRequest:
        """Return the request by which the actor asks for its next step."""
        step = (await self.bus.version()).step
        return ClaimRequest("actor", FIRST, 2, 1, trains=True, step=step, overdue=overdue)

    async def train(self) -> Claim:
        """Train one whole step, from admission to its commit."""
        await self.produce()
        await self.credit()
        claim = await self.claim_step()
        await self.bus.trained([claim], (await self.bus.version()).step)
        return claim

    async def problem(self) -> str:
        """Return what the account finds wrong, told what the producer holds; empty when it balances."""
        await self.bus.report_held("rollout", frozenset(self.held), self.admitted)
        account = await self.bus.account()
        ended = account.trained + sum(account.dropped.values())
        if account.balanced and account.issued != ended + account.in_flight:
            return f"balanced, but issued {account.issued}, ended {ended}, in flight {account.in_flight}"
        return account.problem


def run_on(opens: Open, directory: str, scenario: Scenario, version: Version, settings: dict[str, Any]) -> Any:
    """Run a scenario on a bus that is opened over a directory, and closed after it."""

    async def main() -> Any:
        bus = await opens(dataclasses.replace(SETTINGS, **settings), directory, version)
        try:
            return await scenario(BusFixture(bus))
        finally:
            await bus.close()

    return asyncio.run(main())


def scenario(**settings: Any) -> Callable[[Callable[..., Awaitable[None]]], Callable[..., None]]:
    """Make a test of a coroutine `(self, lab)`, which runs on a bus that is opened with these settings."""

    def decorated(work: Callable[..., Awaitable[None]]) -> Callable[..., None]:
        def test(self: Any, on_bus: Any) -> None:  # its own signature, by which pytest finds the fixture
            on_bus(lambda lab: work(self, lab), **settings)

        test.__name__, test.__qualname__, test.__module__ = work.__name__, work.__qualname__, work.__module__
        return test

    return decorated


def columns(ids: Sequence[RowId], tokens: int) -> dict[str, Ragged]:
    """Make columns whose token values name their row; lengths differ from row to row."""
    lengths = np.array([tokens + row.sample for row in ids], np.int64)
    values = [np.full(tokens + row.sample, token(row), np.int32) for row in ids]
    return {"tokens": Ragged(np.concatenate([np.zeros(0, np.int32), *values]), lengths), "rewards": by_row(ids)}


def token(row: RowId) -> int:
    return row.group * 1000 + row.sample * 10 + row.row


def by_row(ids: Sequence[RowId]) -> Ragged:
    """Make one number a row: its group."""
    return Ragged(np.array([row.group for row in ids], np.float32), np.ones(len(ids), np.int64))
