# SPDX-License-Identifier: Apache-2.0
"""Lines: calls go by the socket where there is one and by Ray where not, and whoever waits learns of its end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import uvloop

from relax_core.api.errors import StaleFence, WorkerDied
from relax_core.runners.ray.connection import BY_RAY_BYTES, Connection, RpcClient, RpcServer, answered, asked


class Actor:
    """As an actor of Ray looks to its callers, in this process; `by_ray` are the calls that did not come by a line."""

    def __init__(self, has_line: bool = True) -> None:
        self.by_ray: list[Any] = []
        self.begun = asyncio.Event()
        self.exchange = RpcServer(self.serve)
        self._has_line = has_line
        self.address = _Method(self._address)
        self.call = _Method(self._call)

    async def _address(self) -> str:
        return self.exchange.address if self._has_line else ""

    async def _call(self, *args: Any) -> Any:
        self.by_ray.append(args)
        return await answered(self.serve(*args))

    async def serve(self, what: str, *args: Any) -> Any:
        self.begun.set()
        if what == "wait":
            await asyncio.Event().wait()
        if what == "refuse":
            raise StaleFence("lease 3 has ended")
        if what == "unpicklable":
            return lambda: None
        return None if what == "none" else (what, *args)


class _Method:
    def __init__(self, function: Any) -> None:
        self.remote = function


@pytest.fixture
async def actor() -> AsyncIterator[Actor]:
    made = Actor()
    await made.exchange.open()
    yield made
    made.exchange.close()


@pytest.fixture
async def reach(actor: Actor) -> AsyncIterator[RpcClient]:
    made = RpcClient(actor)
    yield made
    await made.close()


async def _ask(reach: RpcClient, *call: Any) -> Any:
    return await asked(reach.call(*call), "hub", str(call[0]), 20.0)


async def test_calls_side_by_side_get_their_own_answers_by_the_line(actor: Actor, reach: RpcClient) -> None:
    waiting = asyncio.ensure_future(_ask(reach, "wait"))
    answers = await asyncio.gather(*(_ask(reach, "say", number, b"x" * number * 1000) for number in range(50)))
    assert answers == [("say", number, b"x" * number * 1000) for number in range(50)]
    assert await _ask(reach, "none") is None
    with pytest.raises(StaleFence, match="lease 3 has ended"):
        await _ask(reach, "refuse")
    waiting.cancel()
    assert actor.by_ray == []


def test_lines_work_on_the_loop_that_serve_gives_its_replicas() -> None:
    async def talk() -> Any:
        actor = Actor()
        await actor.exchange.open()
        reach = RpcClient(actor)
        answer = await _ask(reach, "say", 1), actor.by_ray
        await reach.close()
        actor.exchange.close()
        return answer

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(talk()) == (("say", 1), [])


async def test_what_can_not_be_pickled_is_told_to_who_asked_for_it(reach: RpcClient) -> None:
    with pytest.raises(Exception, match="pickle"):
        await _ask(reach, "unpicklable")


async def test_large_calls_and_those_from_elsewhere_go_by_ray(actor: Actor, reach: RpcClient) -> None:
    large = b"x" * BY_RAY_BYTES
    assert await _ask(reach, "say", large) == ("say", large)
    assert len(actor.by_ray) == 1
    elsewhere = Actor(has_line=False)
    assert await _ask(RpcClient(elsewhere), "say") == ("say",)
    assert elsewhere.by_ray == [("say",)]


async def test_a_line_that_nobody_answers_is_none() -> None:
    assert await Connection.open("relax-0123456789abcdef") is None


async def test_who_waits_learns_of_the_end_at_once_and_the_next_call_asks_ray(actor: Actor, reach: RpcClient) -> None:
    waiting = asyncio.ensure_future(_ask(reach, "wait"))
    await actor.begun.wait()
    actor.exchange.close()
    with pytest.raises(WorkerDied, match="hub died during wait"):
        await waiting
    assert await _ask(reach, "say") == ("say",)
    assert actor.by_ray == [("say",)]


async def test_a_peer_of_another_user_gets_no_line(actor: Actor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relax_core.runners.ray.connection.os.getuid", lambda: 4_000_000_000)
    assert await Connection.open(actor.exchange.address) is None
