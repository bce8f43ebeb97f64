# SPDX-License-Identifier: Apache-2.0
"""The service under a virtual clock and concurrent callers."""

from __future__ import annotations

import asyncio
import dataclasses
import heapq

import pytest

from relax_core.api.batch import RowId
from relax_core.api.bus import BusSettings, ClaimRequest, Sealed
from relax_core.api.errors import ConfigError, StaleFence
from relax_core.api.trajectory import Outcome
from relax_core.api.weights import Version
from relax_core.bus.journal import LedgerJournal
from relax_core.bus.queue import TransferQueue
from relax_core.bus.service import BusService
from relax_core.bus.store import MemoryStore
from relax_core.testing.bus_fixture import FIRST, SETTINGS, START, BusFixture, columns, token


class VirtualClock:
    """Time passes only when every task waits: the next sleeper's hour has come."""

    def __init__(self) -> None:
        self.time, self._sleepers, self._count = 0.0, [], 0

    def now(self) -> float:
        return self.time

    async def sleep(self, seconds: float) -> None:
        future = asyncio.get_running_loop().create_future()
        self._count += 1
        heapq.heappush(self._sleepers, (self.time + seconds, self._count, future))
        await future

    def advance(self, seconds: float) -> None:
        until = self.time + seconds
        while self._sleepers and self._sleepers[0][0] <= until:
            self.time, _, future = heapq.heappop(self._sleepers)
            if not future.done():
                future.set_result(None)
        self.time = until


@pytest.fixture
def clock():
    return VirtualClock()


@pytest.fixture
async def bus(tmp_path, clock):
    service = BusService(TransferQueue(SETTINGS, START), MemoryStore(), LedgerJournal(str(tmp_path)), clock)
    yield service
    await service.close()


async def settle() -> None:
    """Let every task run until it waits."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_wait_ends_at_its_deadline_and_not_before(bus, clock):
    waiting = asyncio.create_task(bus.claim(ClaimRequest("one", FIRST, 1), 30.0))
    await settle()
    clock.advance(29.0)
    await settle()
    assert not waiting.done()
    clock.advance(1.0)
    assert await waiting is None


async def test_a_waiting_claim_gets_the_rows_of_an_expired_lease(bus, clock):
    await BusFixture(bus).produce(1)
    held = await bus.claim(ClaimRequest("one", FIRST, 1), 0.0)
    waiting = asyncio.create_task(bus.claim(ClaimRequest("one", FIRST, 1), 10 * SETTINGS.lease_s))
    await settle()
    clock.advance(SETTINGS.lease_s)
    assert (await waiting).rows == held.rows


async def test_using_a_lease_renews_it(bus, clock):
    await BusFixture(bus).produce(1)
    claim = await bus.claim(ClaimRequest("one", FIRST, 1), 0.0)
    for _ in range(5):
        clock.advance(0.6 * SETTINGS.lease_s)
        await bus.verify(claim)


async def test_admission_pauses_and_goes_on(bus, clock):
    bus.pause()
    waiting = asyncio.create_task(bus.admit("rollout", START, 1, 30.0))
    await settle()
    assert not waiting.done()
    bus.resume()
    assert len(await waiting) == 1


async def test_closing_ends_every_wait(bus):
    waiting = asyncio.create_task(bus.claim(ClaimRequest("one", FIRST, 1), 1e9))
    await settle()
    await bus.close()
    assert await waiting is None


async def test_many_consumers_share_the_groups_without_overlap(bus):
    lab = BusFixture(bus)
    claims = [asyncio.create_task(bus.claim(ClaimRequest("one", FIRST, 1), 30.0)) for _ in range(4)]
    await settle()
    issues = await lab.admit(4)
    await asyncio.gather(*(lab.put(issue.attempts) for issue in issues))
    assert sorted(claim.groups for claim in await asyncio.gather(*claims)) == [(0,), (1,), (2,), (3,)]


async def test_many_producers_never_exceed_the_credit(tmp_path, clock):
    settings = BusSettings(2, 8, 0, max_rows=6)
    bus = BusService(TransferQueue(settings, START), MemoryStore(), LedgerJournal(str(tmp_path)), clock)
    lab = BusFixture(bus)
    await bus.trained([], 0)
    issues = await bus.admit("rollout", Version("actor", 0, 1), 8, 0.0)
    bus.queue.settings = BusSettings(2, 1, 0, max_rows=6)
    puts = [asyncio.create_task(lab.put(issue.attempts, wait_s=1.0)) for issue in issues]
    await settle()
    assert bus.queue.credits.rows <= 6
    clock.advance(2.0)
    assert sum(await asyncio.gather(*puts)) == 3
    await bus.close()


async def test_payloads_are_freed_when_a_checkpoint_covers_them(bus, tmp_path):
    lab = BusFixture(bus)
    for step in range(3):
        await lab.train()
        assert len(bus.store) > 0
        await bus.checkpoint(step + 1, str(tmp_path / "checkpoint"))
        assert len(bus.store) == 0


async def test_a_cancelled_put_gives_its_credit_back(tmp_path, clock):
    class Stuck(MemoryStore):
        async def put(self, key, columns):
            await asyncio.get_running_loop().create_future()

    bus = BusService(TransferQueue(SETTINGS, START), Stuck(), LedgerJournal(str(tmp_path)), clock)
    (issue,) = await bus.admit("rollout", START, 1, 0.0)
    put = asyncio.create_task(BusFixture(bus).put(issue.attempts))
    await settle()
    assert bus.queue.credits.rows == 2
    put.cancel()
    await asyncio.gather(put, return_exceptions=True)
    assert (bus.queue.credits.rows, bus.queue.credits.bytes) == (0, 0)
    await bus.close()


async def test_a_host_whose_clients_hold_the_store_needs_only_places(bus):
    lab = BusFixture(bus)
    (issue,) = await lab.admit(1)
    from relax_core.bus.store import assemble

    clients_store = MemoryStore()
    ids = tuple(RowId(*attempt, 0) for attempt in issue.attempts)
    sealed = [Sealed(attempt, 1, Outcome.FINISHED) for attempt in issue.attempts]
    payload = columns(ids, 3)
    key = await bus.begin_put([seal.attempt for seal in sealed], len(ids), 100, 0.0)
    await clients_store.put(key, payload)
    await bus.end_put(key, ids, tuple(payload), 100, sealed)
    claim = await lab.claim("one")
    places = await bus.locate(claim, ("tokens",))
    blocks = await clients_store.get([key], ("tokens",))
    assert [row[0] for row in assemble(places, blocks)["tokens"].rows()] == [token(row) for row in ids]


@pytest.mark.parametrize(
    ("field", "settings"),
    [
        ("max_staleness", BusSettings(2, 2, -1)),
        ("bus.group_size", BusSettings(0, 2, 1)),
        ("min_valid", BusSettings(2, 2, 1, min_valid=3)),
    ],
)
def test_settings_that_can_not_work_are_refused(field, settings):
    with pytest.raises(ConfigError, match=field):
        TransferQueue(settings, START)


async def _begun(bus, lab) -> int:
    """A put that its producer will not end."""
    (issue,) = await lab.admit(1)
    ids = tuple(RowId(*attempt, 0) for attempt in issue.attempts)
    key = await bus.begin_put(issue.attempts, len(ids), 100, 0.0)
    await bus.store.put(key, columns(ids, 3))
    assert (bus.queue.credits.rows, bus.queue.credits.bytes, len(bus.store)) == (2, 100, 1)
    return key


async def test_a_producer_that_died_while_it_put_gives_its_credit_back_when_it_starts_anew(bus):
    key = await _begun(bus, BusFixture(bus))
    await bus.register("actor")
    assert bus.queue.credits.rows == 2, "it is another's"
    await bus.register("rollout")
    assert (bus.queue.credits.rows, bus.queue.credits.bytes, len(bus.store)) == (0, 0, 0)
    with pytest.raises(StaleFence):
        await bus.end_put(key, (), (), 100, [])


async def test_credit_of_a_put_that_never_ends_comes_back_to_who_waits_for_it(tmp_path, clock):
    settings = dataclasses.replace(SETTINGS, groups_per_step=1, max_staleness=3, max_rows=2)
    bus = BusService(TransferQueue(settings, START), MemoryStore(), LedgerJournal(str(tmp_path)), clock)
    lab = BusFixture(bus)
    await _begun(bus, lab)
    _, late = await lab.admit(2)
    waiting = asyncio.create_task(lab.put(late.attempts, wait_s=2 * SETTINGS.lease_s))
    await settle()
    assert not waiting.done()
    clock.advance(SETTINGS.lease_s)
    assert await waiting
    await bus.close()
