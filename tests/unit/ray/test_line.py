# SPDX-License-Identifier: Apache-2.0
"""Calls go by the socket where there is one and by Ray where not, and whoever waits learns of its end."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

import msgpack
import numpy as np
import pytest
import uvloop

from relax_core.api.errors import StaleFence, WorkerDied
from relax_core.rpc import messages
from relax_core.rpc.connection import Connection, RpcServer, connect, proxy
from relax_core.rpc.host import Failure
from relax_core.runners.ray.connection import Packed, RpcClient, answered_by_ray
from relax_core.runners.ray.workers import RayWorker


class Actor:
    """As an actor of Ray looks to its callers, in this process; `by_ray` are the calls that did not come by its socket."""

    def __init__(self, has_socket: bool = True) -> None:
        self.by_ray: list[Any] = []
        self.begun = asyncio.Event()
        self.exchange = RpcServer(self.serve)
        self._has_socket = has_socket
        self.address = _Method(self._address)
        self.call = _Method(self._call)

    async def _address(self) -> str:
        return self.exchange.address if self._has_socket else ""

    async def _call(self, packed: Packed) -> Packed:
        self.by_ray.append(messages.decode(*packed))
        return await answered_by_ray(self.serve, packed)

    async def serve(self, what: str, args: Sequence[Any]) -> Any:
        self.begun.set()
        if what == "wait":
            await asyncio.Event().wait()
        if what == "refuse":
            raise StaleFence("lease 3 has ended")
        if what == "unsendable":
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
    made = RpcClient(actor, "hub")
    yield made
    await made.close()


async def _ask(reach: RpcClient, *call: Any) -> Any:
    what, *args = call
    return await reach.call(what, args, 20.0)


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
        reach = RpcClient(actor, "hub")
        answer = await _ask(reach, "say", 1), actor.by_ray
        await reach.close()
        actor.exchange.close()
        return answer

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(talk()) == (("say", 1), [])


async def test_an_unsendable_answer_is_an_error_for_its_caller(reach: RpcClient) -> None:
    with pytest.raises(Exception, match="can't travel"):
        await _ask(reach, "unsendable")


LIES = {
    "no message": (b"\xc1", []),
    "no bytes": ("text", []),
    "no pair": 5,
    "an unknown type": (msgpack.packb(msgpack.ExtType(1, msgpack.packb(["NoSuchType", []]))), []),
    "a failure of another shape": (messages.encode(Failure(5, "type is no text")), []),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("lie", LIES)
async def test_a_peer_that_sends_another_shape_by_ray_counts_as_dead(lie: str) -> None:
    async def lying(packed: Packed) -> Any:
        return LIES[lie]

    actor = Actor(has_socket=False)
    actor.call = _Method(lying)
    reach = RpcClient(actor, "engine-0")
    with pytest.raises(WorkerDied, match=r"engine-0 died during say: it sent .*(read|failure\.type: got 5)"):
        await _ask(reach, "say")
    await reach.close()


@pytest.mark.parametrize("address", [5, None, ["name", "token"]])
async def test_a_peer_with_an_address_of_another_shape_counts_as_dead(address: Any) -> None:
    async def lying() -> Any:
        return address

    actor = Actor()
    actor.address = _Method(lying)
    reach = RpcClient(actor, "engine-0")
    with pytest.raises(WorkerDied, match="engine-0 died during say: it sent address: got .*; want str"):
        await _ask(reach, "say")
    await reach.close()


async def test_a_stream_by_ray_with_another_shape_counts_as_dead() -> None:
    async def item() -> Any:
        return Failure(5, "type is no text")  # type: ignore[arg-type]

    class Items:
        async def __anext__(self) -> Any:
            return item()

    class Streaming:
        def options(self, **options: Any) -> Any:
            return self

        def remote(self, *args: Any) -> Any:
            return Items()

    actor: Any = Actor()
    actor.stream = Streaming()
    worker = RayWorker("engine-0", actor, 4, "127.0.0.1", None)
    with pytest.raises(WorkerDied, match="engine-0 .* died during generate: it sent failure.type: got 5"):
        async for _ in worker.stream("generate", timeout_s=20.0):
            pass


@pytest.mark.parametrize("has_socket", [True, False])
async def test_large_arrays_arrive_as_they_were_by_either_way(has_socket: bool) -> None:
    actor = Actor(has_socket)
    await actor.exchange.open()
    reach = RpcClient(actor, "hub")
    sent = [np.arange(size, dtype=np.float32) for size in (0, 10, 20_000, 3_000_000)]
    answers = await asyncio.gather(*(_ask(reach, "say", number, sent) for number in range(3)))
    for number, (_, asked_as, got) in enumerate(answers):
        assert asked_as == number
        for array, want in zip(got, sent, strict=True):
            np.testing.assert_array_equal(array, want)
    assert len(actor.by_ray) == (0 if has_socket else 3)
    await reach.close()
    actor.exchange.close()


async def test_calls_from_elsewhere_go_by_ray() -> None:
    elsewhere = Actor(has_socket=False)
    assert await _ask(RpcClient(elsewhere, "hub"), "say") == ("say",)
    with pytest.raises(StaleFence, match="lease 3 has ended"):
        await _ask(RpcClient(elsewhere, "hub"), "refuse")
    with pytest.raises(Exception, match="can't travel"):
        await _ask(RpcClient(elsewhere, "hub"), "unsendable")
    assert [call[0] for call in elsewhere.by_ray] == ["say", "refuse", "unsendable"]


async def test_waiting_callers_learn_of_an_actors_end_at_once(actor: Actor, reach: RpcClient) -> None:
    waiting = asyncio.ensure_future(_ask(reach, "wait"))
    await actor.begun.wait()
    actor.exchange.close()
    with pytest.raises(WorkerDied, match="hub died during wait"):
        await waiting
    assert await _ask(reach, "say") == ("say",)
    assert actor.by_ray == [("say", ())]


async def test_a_peer_without_the_token_is_answered_nothing(actor: Actor) -> None:
    name, _, _ = actor.exchange.address.partition(" ")
    for token in ("", "wrong"):
        assert await connect(f"{name} {token}", "hub") is None
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.connect(f"\0{name}")
    _, stranger = await asyncio.get_running_loop().create_unix_connection(Connection, sock=sock)
    with pytest.raises(ConnectionError):
        await stranger.call("say", ())
    assert not actor.begun.is_set()


class Spoken(Protocol):
    async def say(self, word: str, times: int = 1, loud: bool = False) -> Any: ...


async def test_a_proxy_has_the_methods_of_its_protocol_and_names_its_arguments(reach: RpcClient) -> None:
    spoken = proxy(Spoken, reach.call)
    assert await spoken.say("a") == ("say", "a")
    assert await spoken.say("a", loud=True) == ("say", "a", 1, True)
    assert not hasattr(spoken, "shout")


async def test_closing_during_the_search_for_the_actor_fails_calls_without_a_cancellation(actor: Actor) -> None:
    """A dead actor may take seconds to be known as dead; a task that were cancelled by it would end without a word."""

    async def never() -> str:
        return await asyncio.Event().wait()  # type: ignore[return-value]

    actor.address = _Method(never)
    reach = RpcClient(actor, "engine-0")
    asked = [asyncio.create_task(_ask(reach, "say", number)) for number in range(2)]
    await asyncio.sleep(0)
    await reach.close()
    for one in asked:
        with pytest.raises(WorkerDied, match="engine-0 died during say"):
            await one
