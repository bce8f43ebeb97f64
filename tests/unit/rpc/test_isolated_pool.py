# SPDX-License-Identifier: Apache-2.0
"""The isolated pool with real processes: who breaks one is named, who was beside it is answered, nothing is left running."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from relax_core.api import Chosen
from relax_core.observe.process_log import bound, bound_fields
from relax_core.registry.catalogue import Catalogue
from relax_core.rpc.connection import CALL
from relax_core.rpc.isolated_host import IsolatedHost
from relax_core.rpc.isolated_pool import (
    IsolatedPool,
    ItemCrash,
    ItemTimeout,
    PoolSettings,
    ProcessStarter,
    untrusted,
)
from relax_core.runners.inline import InlineWorkers
from relax_core.runners.local.workers import LocalWorkers
from tests.passing import an_hour_passes
from tests.processes import gone, kept_worker

COMPONENT = Chosen("test", "words")


class Words(IsolatedHost):
    """Does what an item says."""

    def open(self, answer: int = 1) -> int:
        self._answer, self._born = answer, time.monotonic_ns()  # the time differs between processes
        return 1

    def handle(self, item: str) -> Any:
        if item == "block":
            an_hour_passes()
            time.sleep(3600)
        if item == "exit":
            os._exit(3)
        if item == "eat":
            return len(bytearray(8 << 30))
        if item == "raise":
            raise ValueError("no such word")
        if item == "fields":
            return bound_fields()
        if item.startswith("$"):
            return os.environ.get(item[1:], "")
        return self._born if item == "process" else item.upper()

    async def told(self, number: int, word: str) -> Any:
        self.parent.notify("tell", number, word)
        return await self.parent.call("ask", number)

    async def babble(self, number: int) -> None:
        asyncio.get_running_loop().call_soon(self.parent.connection._send, 1000, CALL, 5)  # after the answer

    def fields(self, number: int) -> dict[str, Any]:
        return bound_fields()

    async def hang(self, number: int) -> None:
        self.handle("block")


class AskingWords(Words):
    """Asks the parent about each item."""

    concurrent = True

    async def handle(self, item: str) -> Any:
        asked = asyncio.ensure_future(self.parent.call("ask", item))
        if item == "hour":
            await asyncio.sleep(0)
            an_hour_passes()
        return await asked


class AwaitedWords(Words):
    """Handles items in tasks, several at a time."""

    concurrent = True

    async def handle(self, item: str) -> Any:
        return super().handle(item)


@asynccontextmanager
async def pool(host: str = "Words", count: int = 1, **options: Any) -> AsyncIterator[IsolatedPool]:
    workers = LocalWorkers()
    target = f"tests.unit.rpc.test_isolated_pool:{host}"
    names = [f"words-{number}" for number in range(count)]
    process = {name: options.pop(name) for name in ("memory_mb", "env", "inherit_env") if name in options}
    settings = PoolSettings(**{"timeout_s": 60.0, **options})
    made = IsolatedPool(names, untrusted(COMPONENT, target, **process), ProcessStarter(workers), settings)
    try:
        async with asyncio.timeout(300):
            await made.start()
            yield made
    finally:
        await made.stop()
        assert all(gone(worker.pid) for worker in workers._started)
        await workers.close()


async def answers(pool: IsolatedPool, *items: str) -> list[Any]:
    return await asyncio.gather(*(pool.submit(item) for item in items), return_exceptions=True)


async def test_the_call_that_ended_its_process_is_named_and_the_others_run_again() -> None:
    async with pool() as made:
        (before,) = await answers(made, "process")
        a, crash, b, error, after = await answers(made, "a", "exit", "b", "raise", "process")
    assert (a, b) == ("A", "B") and after != before
    assert isinstance(crash, ItemCrash) and "ended with status 3" in str(crash)
    assert isinstance(error, ValueError) and str(error) == "no such word"


@pytest.mark.parametrize("host", ["Words", "AwaitedWords"])
async def test_the_log_records_of_an_item_have_the_fields_of_its_sender(host: str) -> None:
    async with pool(host) as made:
        sent = []
        for sample in range(3):
            with bound(group=7, sample=sample):
                sent.append(made.submit("fields"))
        assert await asyncio.gather(*sent, made.submit("fields")) == [
            *({"group": 7, "sample": n} for n in range(3)),
            {},
        ]
        async with made.session() as session:
            with bound(step=2):
                assert await session.call("fields") == {"step": 2}
            assert await session.call("fields") == {}


async def test_a_call_past_the_deadline_is_named_and_its_process_killed() -> None:
    async with pool() as made:
        process = kept_worker("words-0")
        (before,) = await answers(made, "process")
        a, late, after = await answers(made, "a", "block", "process")
        assert gone(process)
    assert a == "A" and isinstance(late, ItemTimeout) and after != before


async def test_an_item_over_the_memory_limit_costs_its_process_and_no_other_item() -> None:
    async with pool(memory_mb=2048) as made:
        (before,) = await answers(made, "process")
        a, hungry, after = await answers(made, "a", "eat", "process")
    assert a == "A" and "MemoryError" in str(hungry) and after != before


async def test_items_and_sessions_call_the_parent_in_order_and_waiting_is_not_their_own_time() -> None:
    told: list[tuple[int, str]] = []

    async def ask(item: Any) -> Any:
        if item == "bad":
            raise ValueError("the parent's own error")
        return [item, len(told)]

    handlers = {"ask": ask, "tell": lambda number, word: told.append((number, word))}
    async with pool("AskingWords", opened=lambda opened: handlers) as made:
        (hour,) = await answers(made, "hour")
        bad, b = await answers(made, "bad", "b")
        assert (hour, b) == (("hour", 0), ("b", 0)) and str(bad) == "the parent's own error"
        async with made.session() as session:
            assert await session.call("told", "x") == (session.number, 1)
            assert await session.long_call("told", "y") == (session.number, 2)
    assert [word for _, word in told] == ["x", "y"]


async def test_a_host_in_this_process_calls_the_parent_in_order_too() -> None:
    told: list[str] = []
    handlers = {"ask": lambda number: [number, len(told)], "tell": lambda number, word: told.append(word)}
    workers, spec = InlineWorkers(Catalogue.load([])), untrusted(COMPONENT, f"{__name__}:Words")
    settings = PoolSettings(timeout_s=60.0, opened=lambda opened: handlers)
    made = IsolatedPool(["words-0"], spec, ProcessStarter(workers), settings)
    await made.start()
    async with made.session() as session:
        assert await session.call("told", "x") == (session.number, 1)
        with pytest.raises(TypeError, match="can't travel"):
            workers._started[0]._host.instance.parent.notify("tell", 1, object())
    await made.stop()


class Untold(Exception):
    def __str__(self) -> str:
        raise RuntimeError("can't be described")


async def test_an_answer_of_the_parent_that_fails_on_its_way_is_an_error_and_no_wait_for_ever() -> None:
    """It can't travel, its error has no text, or whoever makes it is cancelled."""

    async def ask(item: str) -> Any:
        if item == "odd":
            return object()
        if item == "cancelled":
            raise asyncio.CancelledError
        if item == "ended" and (task := asyncio.current_task()) is not None:
            task.cancel()
            await asyncio.sleep(0)
        if item == "untold":
            raise Untold
        return item

    async with pool("AskingWords", opened=lambda opened: {"ask": ask}) as made:
        async with asyncio.timeout(60):
            *failed, well = await answers(made, "odd", "cancelled", "untold", "ended", "well")
    assert all(isinstance(error, Exception) for error in failed) and well == "well"
    assert "can't travel" in str(failed[0]) and "cancelled" in str(failed[1]) and "Untold" in str(failed[2])
    assert "was cancelled by the run" in str(failed[3])


async def test_a_process_that_sends_a_call_of_another_shape_is_killed_without_a_waiting_call() -> None:
    async with pool() as made, made.session() as session:
        worker: Any = made._processes[0].worker
        await session.call("babble")
        await worker._process.wait()
        with pytest.raises(ItemCrash, match=r"stopped answering \(it sent a request 5"):
            await session.call("fields")


async def test_a_session_loses_its_state_with_its_process() -> None:
    async with pool(count=2, timeout_s=1.0) as made, made.session() as one, made.session() as other:
        silent = asyncio.create_task(one.long_call("hang"))
        with pytest.raises(ItemTimeout):
            await silent
        with pytest.raises(ItemCrash, match="replaced"):
            await one.call("told", "x")
        with pytest.raises(ItemTimeout):
            await other.call("hang")
        assert await answers(made, "a", "b") == ["A", "B"]


async def test_a_process_sees_the_variables_that_it_may_and_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "1")
    monkeypatch.setenv("SHARED", "2")
    allowed = ("PATH", "PYTHONPATH", "SHARED")
    async with pool(env={"GIVEN": "3"}, inherit_env=allowed) as made:
        assert await answers(made, "$SECRET", "$SHARED", "$GIVEN") == ["", "2", "3"]


async def test_a_cancelled_item_does_not_run() -> None:
    async with pool() as made:
        (before,) = await answers(made, "process")
        made.submit("exit").cancel()
        assert await answers(made, "a", "process") == ["A", before]


async def test_stopping_fails_open_calls() -> None:
    async with pool() as made:
        waiting = made.submit("block")
        await asyncio.sleep(0)
        await made.stop()
        with pytest.raises(Exception, match="was stopped"):
            await waiting
