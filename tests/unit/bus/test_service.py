# SPDX-License-Identifier: Apache-2.0
"""The service under a virtual clock and concurrent callers."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from relax_core.api.batch import RowId
from relax_core.api.bus import BusSettings, ClaimRequest
from relax_core.api.errors import ConfigError, StaleFence
from relax_core.bus.journal import LedgerJournal
from relax_core.bus.queue import TransferQueue
from relax_core.bus.service import BusService
from relax_core.bus.store import MemoryStore
from relax_core.testing.bus_fixture import FIRST, SETTINGS, START, BusFixture, columns
from tests.clocks import SleepersClock, settle


@pytest.fixture
def clock():
    return SleepersClock()


@pytest.fixture
async def bus(tmp_path, clock):
    service = BusService(TransferQueue(SETTINGS, START), MemoryStore(), LedgerJournal(str(tmp_path)), clock)
    yield service
    await service.close()


async def test_a_wait_ends_at_its_deadline_and_not_before(bus, clock):
    waiting = asyncio.create_task(bus.claim(ClaimRequest("one", FIRST, 1), 30.0))
    await settle()
    clock.advance(29.0)
    await settle()
    assert not waiting.done()
    clock.advance(1.0)
    assert await waiting is None


async def test_admission_pauses_and_continues(bus, clock):
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


@pytest.mark.parametrize(
    ("field", "settings"),
    [
        ("max_staleness", BusSettings(2, 2, -1)),
        ("bus.group_size", BusSettings(0, 2, 1)),
        ("min_valid", BusSettings(2, 2, 1, min_valid=3)),
    ],
)
def test_settings_that_cannot_work_are_refused(field, settings):
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


async def test_credit_of_a_producer_that_died_in_a_put_returns_at_its_restart(bus):
    key = await _begun(bus, BusFixture(bus))
    await bus.register("actor")
    assert bus.queue.credits.rows == 2, "it is another's"
    await bus.register("rollout")
    assert (bus.queue.credits.rows, bus.queue.credits.bytes, len(bus.store)) == (0, 0, 0)
    with pytest.raises(StaleFence):
        await bus.end_put(key, (), (), 100, [])


async def test_credit_of_an_unfinished_put_returns_to_waiting_producers(tmp_path, clock):
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
