# SPDX-License-Identifier: Apache-2.0
"""Answers of the bus that never arrive, since their socket was cut or their caller went on without them, hold nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from relax_core.api.bus import Bus, ClaimRequest
from relax_core.api.role import SystemClock
from relax_core.bus.service import BusService, open_bus
from relax_core.bus.store import InProcessBus
from relax_core.rpc.connection import CALL, Connection, RpcServer, connect, proxy
from relax_core.testing.bus_fixture import FIRST, SETTINGS, START, WAIT_S, BusFixture

LONG_S = 60.0
"""A wait that outlasts the test, and is far below the time of a lease."""


@pytest.fixture
async def bus(tmp_path: Path) -> AsyncIterator[BusService]:
    service = await open_bus(InProcessBus(), SETTINGS, str(tmp_path), START, SystemClock())
    yield service
    await service.close()


@pytest.fixture
async def server(bus: BusService) -> AsyncIterator[RpcServer]:
    """The bus on a socket, as the hub serves it."""

    async def call(method: str, args: Sequence[Any]) -> Any:
        return await getattr(bus, method)(*args)

    opened = RpcServer(call)
    await opened.open()
    yield opened
    opened.close()


async def role(server: RpcServer) -> tuple[Connection, Bus]:
    connection = await connect(server.address, "hub")
    assert connection is not None
    return connection, proxy(Bus, connection.call)


async def until_it_waits(bus: BusService, number: int) -> None:
    """Until so many calls wait."""
    async with asyncio.timeout(WAIT_S):
        while len(bus._changes._waiters) != number:
            await asyncio.sleep(0.01)


async def end(connection: Connection, calling: asyncio.Task[Any], how: str) -> None:
    """Cut the socket under a call, or cancel the call alone."""
    if how == "cut":
        connection._transport.abort()
        with pytest.raises(ConnectionError):
            await calling
    else:
        calling.cancel()
        await asyncio.gather(calling, return_exceptions=True)


@pytest.mark.parametrize("how", ["cut", "cancelled"])
async def test_a_claim_whose_caller_died_takes_no_rows_from_its_successor(
    bus: BusService, server: RpcServer, how: str
) -> None:
    connection, first = await role(server)
    await first.register("reference")
    calling = asyncio.create_task(first.claim(ClaimRequest("reference", FIRST, 2, min_groups=2), LONG_S))
    await until_it_waits(bus, 1)
    await end(connection, calling, how)
    again, second = await role(server)
    await second.register("reference")
    await BusFixture(bus).produce(2)
    claim = await second.claim(ClaimRequest("reference", FIRST, 2, min_groups=2), WAIT_S)
    assert claim is not None and len(claim.groups) == 2
    await second.verify(claim)
    assert [lease.number for lease in bus.queue.leases.out.values()] == [claim.lease]
    connection.close()
    again.close()


@pytest.mark.parametrize("how", ["cut", "cancelled"])
async def test_an_admission_whose_caller_died_takes_no_groups_from_its_successor(
    bus: BusService, server: RpcServer, how: str
) -> None:
    bus.pause()
    connection, first = await role(server)
    await first.register("rollout")
    calling = asyncio.create_task(first.admit("rollout", START, 100, LONG_S))
    await until_it_waits(bus, 1)
    await end(connection, calling, how)
    again, second = await role(server)
    await second.register("rollout")
    bus.resume()
    issues = await second.admit("rollout", START, 100, WAIT_S)
    assert len(issues) == 4, "all that the gate grants to this version"
    held = frozenset(attempt for issue in issues for attempt in issue.attempts)
    await second.report_held("rollout", held, len(held))
    account = await second.account()
    assert account.balanced and account.in_flight == len(held) == account.issued
    connection.close()
    again.close()


async def test_a_put_whose_producer_died_keeps_no_credit(bus: BusService, server: RpcServer) -> None:
    connection, first = await role(server)
    await first.register("rollout")
    issues = await first.admit("rollout", START, 4, WAIT_S)
    attempts = issues[-1].attempts
    bus.queue.credits.max_rows = 1
    bus.queue.credits.reserve(0, 1, 1)  # the bus is full
    calling = asyncio.create_task(proxy(BusService, connection.call).begin_put(attempts, 100, 1000, LONG_S))
    await until_it_waits(bus, 1)
    await end(connection, calling, "cut")
    again, second = await role(server)
    await second.register("rollout")
    bus.queue.credits.unreserve(0)
    bus._changes.notify()
    await until_it_waits(bus, 0)
    async with asyncio.timeout(WAIT_S):
        while (bus.queue.credits.rows, bus.queue.credits.bytes) != (0, 0):
            await asyncio.sleep(0.01)
    again.close()


async def test_a_caller_that_repeats_the_number_of_an_open_call_is_disconnected() -> None:
    ends, faults = asyncio.Event(), list[dict[str, Any]]()

    async def call(method: str, args: Sequence[Any]) -> None:
        await ends.wait()

    server = RpcServer(call)
    await server.open()
    asyncio.get_running_loop().set_exception_handler(lambda _, fault: faults.append(fault))
    connection = await connect(server.address, "hub")
    assert connection is not None
    (served,) = server._connections
    first = asyncio.create_task(connection.call("first", ()))
    await asyncio.sleep(0)
    connection._send(connection._numbers, CALL, ["second", [], {}])
    with pytest.raises(ConnectionError):
        await first
    assert served.refused == f"a second request with the number {connection._numbers}"
    ends.set()
    await asyncio.gather(*served._serving.values())
    await asyncio.sleep(0)
    assert not served._serving and not faults
    server.close()
