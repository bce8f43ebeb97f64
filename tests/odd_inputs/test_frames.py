# SPDX-License-Identifier: Apache-2.0
"""A process that sends another shape counts as crashed, and the plugin is named; the role that reads never fails."""

from __future__ import annotations

import asyncio
import socket
import tomllib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import msgpack
import pytest

from relax_core.api import Chosen, Message, Outcome, Task, Trajectory
from relax_core.api.errors import PluginError
from relax_core.api.role import SystemClock, WorkerSpec
from relax_core.config.run_config import EnvironmentChoice, RewardChoice
from relax_core.observe.process_log import bound_fields
from relax_core.rewards.host import RewardFacts, ScoredSample, check_results
from relax_core.rewards.scorer import RewardScorer
from relax_core.rpc import connection, messages
from relax_core.rpc.connection import HEAD, Connection
from relax_core.rpc.host import Failure
from relax_core.rpc.isolated_pool import IsolatedPool, ItemCrash, PoolSettings, ProcessStarter, untrusted
from relax_core.sampling.environments import CallFailed, EnvironmentPool
from tests.odd_inputs import authors
from tests.unit.sampling.toy_policy import Script, play

TABLE = tomllib.loads((Path(__file__).parent / "frames.toml").read_text())
NAMES = {
    "CallFailed": CallFailed,
    "Failure": Failure,
    "RewardFacts": RewardFacts,
    "ScoredSample": ScoredSample,
    "msgpack": msgpack,
}
FACTS = RewardFacts("sample", "odd.py:1", (), None, False)
SAMPLE = (Task("t", "?"), Trajectory((Message("assistant", "a"),), "a", ()))


def value(expression: str) -> Any:
    return authors.value(expression, **NAMES)


def entries(kind: str) -> Any:
    return pytest.mark.parametrize(
        "entry",
        TABLE[kind],
        ids=lambda e: str(e.get("sends") or e.get("start") or e.get("value") or e.get("bytes"))[:60],
    )


@entries("frame")
async def test_a_frame_of_another_shape_closes_the_connection(entry: dict[str, Any]) -> None:
    ours, theirs = socket.socketpair()
    mine = Connection("odd")
    await asyncio.get_running_loop().create_unix_connection(lambda: mine, sock=ours)
    theirs.setblocking(False)

    async def ask() -> Any:
        if entry.get("asked") == "stream":
            return [item async for item in mine.stream("items", ())]
        return await mine.call("one", ())

    asked = asyncio.create_task(ask())
    try:
        head = await asyncio.get_running_loop().sock_recv(theirs, 1 << 16)
        number, *_ = HEAD.unpack_from(head)
        body = value(entry["bytes"]) if "bytes" in entry else messages.encode(value(entry["value"]))
        kind = getattr(connection, entry["kind"], None)
        frame = HEAD.pack(number, int(entry["kind"]) if kind is None else kind, 0, len(body)) + body
        await asyncio.get_running_loop().sock_sendall(theirs, frame)
        async with asyncio.timeout(20):
            if entry.get("ok"):
                assert await asked == value(entry["value"])
                return
            with pytest.raises(Exception) as caught:
                await asked
        if "raises" in entry:
            assert entry["raises"] in str(caught.value) and not mine.lost
        else:
            assert isinstance(caught.value, ConnectionError) and entry["says"] in str(caught.value)
            assert mine.lost
    finally:
        asked.cancel()
        mine.close()
        theirs.close()


@entries("request")
async def test_a_call_of_another_shape_closes_the_connection_to_a_process(entry: dict[str, Any]) -> None:
    ours, theirs = socket.socketpair()
    lost, asked = asyncio.Event(), asyncio.Event()

    async def answer(method: str, args: Sequence[Any]) -> None:
        assert (method, args, bound_fields()) == ("ask", ("x",), {}), "the process sets no fields of the parent's log"
        asked.set()

    mine = Connection("odd", on_lost=lambda _: lost.set())
    await asyncio.get_running_loop().create_unix_connection(lambda: mine, sock=ours)
    mine.serve_untrusted(answer)
    mine._greeted = True
    try:
        body = messages.encode(value(entry["value"]))
        theirs.sendall(HEAD.pack(1, connection.CALL, 0, len(body)) + body)
        async with asyncio.timeout(20):
            await (asked if entry.get("ok") else lost).wait()
        assert mine.refused == entry.get("says", "")
    finally:
        mine.close()
        theirs.close()


class LyingWorker:
    """A worker that answers with values of the table."""

    host, alive = "127.0.0.1", True

    def __init__(self, name: str, answers: dict[str, Any]) -> None:
        self.name, self.pid, self._answers = name, 4, answers

    async def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        found = self._answers[method]
        return value(found) if isinstance(found, str) else found

    async def stream(self, method: str, *args: Any, timeout_s: float) -> AsyncIterator[Any]:
        yield await self.call(method, timeout_s=timeout_s)

    async def kill(self) -> None:
        self.alive = False


class LyingWorkers:
    def __init__(self, answers: dict[str, Any]) -> None:
        self._answers, self.started = answers, 0

    async def start(self, specs: Sequence[WorkerSpec], timeout_s: float = 0.0) -> tuple[Any, ...]:
        self.started += 1
        return tuple(LyingWorker(spec.name, self._answers) for spec in specs)

    async def close(self) -> None: ...


@entries("part")
async def test_results_of_another_shape_crash_the_process_and_name_the_reward(entry: dict[str, Any]) -> None:
    opened = (False, False, FACTS)
    workers: Any = LyingWorkers({"start": entry.get("start", opened), "run_items": entry.get("sends")})
    if "start" in entry:
        scorer = RewardScorer([RewardChoice(chosen=Chosen("reward", "odd"))], ProcessStarter(workers), SystemClock())
        with pytest.raises(PluginError) as failed:
            await scorer.start()
        assert entry["raises"] in str(failed.value) and failed.value.exit_code == 3
        return
    pool = IsolatedPool(
        ["reward-odd-0"], untrusted(Chosen("reward", "odd"), "none"), ProcessStarter(workers),
        PoolSettings(timeout_s=9.0, pack=len, check=check_results),
    )  # fmt: skip
    await pool.start()
    try:
        async with asyncio.timeout(20):
            if entry.get("ok"):
                assert await pool.submit([SAMPLE]) == [0.5]
                return
            with pytest.raises(Exception) as caught:
                await pool.submit([SAMPLE])
        if "raises" in entry:
            assert isinstance(caught.value, PluginError) and entry["raises"] in str(caught.value)
        else:
            assert isinstance(caught.value, ItemCrash) and entry["says"] in str(caught.value)
            assert "reward-odd-0" in str(caught.value) and workers.started > 1
    finally:
        await pool.stop()


async def test_a_reward_whose_process_sends_invalid_frames_gives_outcomes_and_no_scores() -> None:
    answers = {
        "start": (False, False, FACTS),
        "run_items": '([[0, "done", ["1"]]], False)',
    }
    workers: Any = LyingWorkers(answers)
    scorer = RewardScorer([RewardChoice(chosen=Chosen("reward", "odd"))], ProcessStarter(workers), SystemClock())
    await scorer.start()
    ((scored,),) = await scorer.score([(SAMPLE[0], [SAMPLE[1]])])
    await scorer.stop()
    assert scored.outcome is Outcome.REWARD_ERROR and "reward odd: its process ended twice" in scored.error


@entries("answer")
async def test_an_environment_whose_process_sends_invalid_frames_fails_its_samples(entry: dict[str, Any]) -> None:
    answers = {"start": (False, False, ((), None)), "reset": ((), ""), "step": entry["sends"]}
    workers: Any = LyingWorkers({**answers, "close": None})
    choice = EnvironmentChoice(chosen=Chosen("environment", "odd"), timeout_s=9.0)
    pool = EnvironmentPool(choice, ProcessStarter(workers), build=lambda chosen: authors.OddEnvironment())
    await pool.start()
    try:
        async with asyncio.timeout(20):
            trajectory = await pool.play(lambda environment: play(environment, Script("a"), SAMPLE[0]))
    finally:
        await pool.stop()
    assert trajectory.outcome is Outcome.ENVIRONMENT_ERROR and entry["says"] in trajectory.info["error"]
