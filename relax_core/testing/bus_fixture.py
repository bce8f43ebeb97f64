# SPDX-License-Identifier: Apache-2.0
"""A simulated run for the conformance suite of buses: a producer, a role that writes advantages, and a trainer."""

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
"""Seconds within which an expected result must arrive."""
SHORT_S = 0.05
"""Seconds to wait in a call that must return without a result."""
FIRST = ("tokens", "rewards")
START = Version("actor", 0, 0)
SETTINGS = BusSettings(group_size=2, groups_per_step=2, max_staleness=1, columns=("tokens", "advantages"))


Scenario = Callable[["BusFixture"], Awaitable[Any]]
Open = Callable[[BusSettings, str, Version], Awaitable[Bus]]


@dataclass(slots=True)
class BusFixture:
    """An open bus with the state of its producer."""

    bus: Bus
    held: set[AttemptId] = field(default_factory=set)
    """Admitted attempts that are not on the bus yet."""
    admitted: int = 0
    """Number of attempts admitted so far."""

    async def admit(self, limit: int = 2, wait_s: float = WAIT_S) -> tuple[Issue, ...]:
        """Admit groups that an engine with the newest weights may start."""
        issues = await self.bus.admit("rollout", await self.bus.version(), limit, wait_s)
        self.admitted += sum(len(issue.attempts) for issue in issues)
        self.held.update(attempt for issue in issues for attempt in issue.attempts)
        return issues

    async def put(
        self, attempts: Sequence[AttemptId], rows: int = 1, wait_s: float = WAIT_S, step: int | None = None
    ) -> bool:
        """Put samples on the bus, each with `rows` rows, sampled by the newest weights or by the weights of `step`."""
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
        """Put this number of whole groups on the bus, one after another."""
        issues = await self.admit(groups)
        for issue in issues:
            await self.put(issue.attempts)
        return issues

    async def claim(self, task: str = "advantages", groups: int = 1, needs: Sequence[str] = FIRST) -> Claim:
        """Claim rows for the consumer named `task`; fail if none arrive."""
        return await self._claimed(ClaimRequest(task, tuple(needs), groups))

    async def nothing_for(self, task: str) -> bool:
        """Return True if a task gets no rows now."""
        return await self.bus.claim(ClaimRequest(task, FIRST, 1), SHORT_S) is None

    async def credit(self) -> Claim:
        """Claim rows, write their advantages (each row's group number) and acknowledge."""
        claim = await self.claim(groups=8)
        await self.bus.write(claim, {"advantages": by_row(claim.rows)})
        await self.bus.acknowledge(claim)
        return claim

    async def claim_step(self, overdue: bool = False) -> Claim:
        """Claim the actor's groups for its next step; fail if none arrive."""
        return await self._claimed(await self.step_request(overdue))

    async def _claimed(self, request: ClaimRequest) -> Claim:
        claim = await self.bus.claim(request, WAIT_S)
        assert claim is not None, f"claim() returned no rows within {WAIT_S:g} s, although rows are ready"
        return claim

    async def step_waits(self) -> bool:
        """Return True if the actor gets no rows for its next step now."""
        return await self.bus.claim(await self.step_request(False), SHORT_S) is None

    async def step_request(self, overdue: bool) -> ClaimRequest:
        """Return the actor's claim request for its next step."""
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
        """Report the held attempts; return the account's error text, which is empty if the account balances."""
        await self.bus.report_held("rollout", frozenset(self.held), self.admitted)
        account = await self.bus.account()
        ended = account.trained + sum(account.dropped.values())
        if account.balanced and account.issued != ended + account.in_flight:
            return f"balanced, but issued {account.issued}, ended {ended}, in flight {account.in_flight}"
        return account.problem


def run_on(opens: Open, directory: str, scenario: Scenario, version: Version, settings: dict[str, Any]) -> Any:
    """Open a bus that keeps its ledger in a directory, run a scenario on the bus, and close it."""

    async def main() -> Any:
        bus = await opens(dataclasses.replace(SETTINGS, **settings), directory, version)
        try:
            return await scenario(BusFixture(bus))
        finally:
            await bus.close()

    return asyncio.run(main())


def scenario(**settings: Any) -> Callable[[Callable[..., Awaitable[None]]], Callable[..., None]]:
    """Turn a coroutine `(self, lab)` into a test that runs on a bus with these settings."""

    def decorated(work: Callable[..., Awaitable[None]]) -> Callable[..., None]:
        def test(self: Any, on_bus: Any) -> None:  # pytest finds the fixture by this signature
            on_bus(lambda lab: work(self, lab), **settings)

        test.__name__, test.__qualname__, test.__module__ = work.__name__, work.__qualname__, work.__module__
        return test

    return decorated


def columns(ids: Sequence[RowId], tokens: int) -> dict[str, Ragged]:
    """Make columns whose token values identify their row; row lengths differ by sample."""
    lengths = np.array([tokens + row.sample for row in ids], np.int64)
    values = [np.full(tokens + row.sample, token(row), np.int32) for row in ids]
    return {"tokens": Ragged(np.concatenate([np.zeros(0, np.int32), *values]), lengths), "rewards": by_row(ids)}


def token(row: RowId) -> int:
    return row.group * 1000 + row.sample * 10 + row.row


def by_row(ids: Sequence[RowId]) -> Ragged:
    """Make a column with each row's group number."""
    return Ragged(np.array([row.group for row in ids], np.float32), np.ones(len(ids), np.int64))
