# SPDX-License-Identifier: Apache-2.0
"""What runs in an environment's killable process: many instances of one environment, a number each.

Errors and deadlines of an instance travel back as data, so that they cost its sample only. A call that blocks the
loop is the parent's to notice and to kill.

The session that a driving environment holds in its own process: what it asks goes down a line, turns come back.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from relax_core.api.environment import Action, Environment, Observation
from relax_core.api.task import Message, Task
from relax_core.api.trainer import Chosen
from relax_core.engines.model_rpc_client import Ask, ModelRpcConnection
from relax_core.sampling.environment_handle import EnvironmentFailed, guarded, reset, step, told
from relax_core.sampling.session import SessionEnded, state_of


class SessionChannel:
    """Requests of all branches of one sample, in order, and the turns they wait for."""

    def __init__(self, form: Callable[[Observation | str], tuple[Message, ...]]) -> None:
        self.form = form
        self.branches = 1
        self._requests: list[list[Any]] = []
        self._turns: dict[int, asyncio.Future[Action]] = {}
        self._asked = 0
        self._news = asyncio.Event()

    def put(self, *request: Any) -> None:
        self._requests.append(list(request))
        self._news.set()

    def take(self) -> list[list[Any]]:
        taken, self._requests = self._requests, []
        self._news.clear()
        return taken

    async def wait(self, work: asyncio.Future[None], seconds: float) -> None:
        """Until there is something to take, the work is done, or the seconds are over."""
        work.add_done_callback(self._wake)
        try:
            async with asyncio.timeout(seconds):
                await self._news.wait()
        except TimeoutError:
            pass
        finally:
            work.remove_done_callback(self._wake)

    async def turn(self, branch: int, max_new_tokens: int | None, stop: tuple[str, ...]) -> Action:
        self._asked += 1
        future: asyncio.Future[Action] = asyncio.get_running_loop().create_future()
        self._turns[self._asked] = future
        self.put("generate", branch, self._asked, max_new_tokens, stop)
        return await future

    def answer(self, request: int, action: Action | None) -> None:
        future = self._turns.pop(request, None)
        if future is None or future.done():
            return
        if action is None:
            future.set_exception(SessionEnded("the sample has ended"))
        else:
            future.set_result(action)

    def _wake(self, work: asyncio.Future[None]) -> None:
        self._news.set()


class RemoteSession:
    """One branch, by number."""

    def __init__(self, line: SessionChannel, branch: int) -> None:
        self._line, self._branch = line, branch

    async def generate(self, max_new_tokens: int | None = None, stop: tuple[str, ...] = ()) -> Action:
        return await self._line.turn(self._branch, max_new_tokens, stop)

    def observe(self, observation: Observation | str) -> None:
        self._line.put("observe", self._branch, self._line.form(observation), state_of(observation))

    def fork(self) -> RemoteSession:
        return self._new("fork", self._branch)

    def restart(self, prompt: str | tuple[Message, ...]) -> RemoteSession:
        return self._new("restart", self._branch, prompt)

    def reward(self, value: float) -> None:
        self._line.put("reward", self._branch, float(value))

    def _new(self, what: str, branch: int, *rest: Any) -> RemoteSession:
        number = self._line.branches
        self._line.branches += 1
        self._line.put(what, branch, number, *rest)
        return RemoteSession(self._line, number)


BEAT_S = 0.5
"""How often a driving instance shows that the loop is alive."""


class EnvironmentHost:
    """Holds the instances; the worker's host sets `component` and `build` before the first call."""

    component: Chosen
    build: Callable[[Chosen], Any]

    def __init__(self) -> None:
        self._prototype: Environment = Environment()
        self._shared: object = None
        self._instances: dict[int, Environment] = {}
        self._lines: dict[int, SessionChannel] = {}
        self._driving: dict[int, asyncio.Future[None]] = {}
        self._engines = ModelRpcConnection()

    async def open(self) -> tuple[str, ...]:
        """Once a worker: build the options, run the author's shared set-up; the engine pools that it asks."""
        self._prototype = self.build(self.component)
        self._shared = await type(self._prototype).open(self._prototype.options)
        return tuple(self._prototype.needs_engines)

    async def asks(self) -> AsyncIterator[list[Ask]]:
        """What the instances ask of engine pools, as long as this process lives."""
        async for asks in self._engines.asks():
            yield asks

    async def answered(self, number: int, failure: str, value: Any) -> None:
        """What became of one of them."""
        self._engines.answered(number, failure, value)

    async def reset(self, number: int, task: Task, seed: int, timeout_s: float) -> Any:
        return await _told(lambda: guarded(reset(self._made(number), task, seed), timeout_s, "reset"))

    async def step(self, number: int, action: Action, timeout_s: float) -> Any:
        return await _told(lambda: guarded(step(self._instances[number], action), timeout_s, "step"))

    async def close(self, number: int, timeout_s: float) -> Any:
        instance = self._instances.pop(number, None)
        self._lines.pop(number, None)
        if instance is None:
            return ["", None]
        return await _told(lambda: guarded(self._closed(number, instance), timeout_s, "close"))

    async def run(self, number: int, task: Task, seed: int) -> AsyncIterator[list[Any]]:
        """What a driving instance asks for, as it asks; the last item is how it ended."""
        instance = self._made(number)
        line = self._lines[number] = SessionChannel(instance.format_observation)
        work = asyncio.ensure_future(instance.run(task, seed, RemoteSession(line, 0)))
        self._driving[number] = work
        try:
            while not work.done():
                await line.wait(work, BEAT_S)
                yield line.take()
            yield [*line.take(), _ending(work)]
        finally:
            await self._halt(number)

    async def answer(self, number: int, request: int, action: Action | None) -> None:
        """A turn that was asked for; None when the sample has ended."""
        if number in self._lines:
            self._lines[number].answer(request, action)

    async def _closed(self, number: int, instance: Environment) -> None:
        await self._halt(number)
        await instance.close()

    async def _halt(self, number: int) -> None:
        work = self._driving.pop(number, None)
        if work is not None:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)

    def _made(self, number: int) -> Environment:
        instance = type(self._prototype)(self._prototype.options)
        instance.shared = self._shared
        instance.engines = self._engines.hands(instance.needs_engines)
        self._instances[number] = instance
        return instance


async def _told(work: Callable[[], Awaitable[Any]]) -> Any:
    """[outcome, message] of a failure, or ['', result]."""
    try:
        return ["", await work()]
    except EnvironmentFailed as failure:
        return [failure.outcome.value, str(failure)]
    except Exception as error:  # the author's constructor
        return ["environment_error", told("making it", error)]


def _ending(work: asyncio.Future[None]) -> list[Any]:
    error = None if work.cancelled() else work.exception()
    if error is None or isinstance(error, SessionEnded):
        return ["end", "", ""]
    return ["end", "environment_error", told("run", error)]
