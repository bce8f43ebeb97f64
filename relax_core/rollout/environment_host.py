# SPDX-License-Identifier: Apache-2.0
"""What runs in an environment's killable process: many instances of one environment, a number each.

Errors and deadlines of an instance travel back as data, so that they cost its sample only. A call that blocks the
loop is the parent's to notice and to kill.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from relax_core.api.environment import Action, Environment
from relax_core.api.task import Task
from relax_core.api.trainer import Chosen
from relax_core.rollout.engine_line import Ask, EngineLine
from relax_core.rollout.environment_handle import EnvironmentFailed, guarded, reset, step, told
from relax_core.rollout.remote_session import Line, RemoteSession
from relax_core.rollout.session import Ended

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
        self._lines: dict[int, Line] = {}
        self._driving: dict[int, asyncio.Future[None]] = {}
        self._engines = EngineLine()

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
        line = self._lines[number] = Line(instance.format_observation)
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
    if error is None or isinstance(error, Ended):
        return ["end", "", ""]
    return ["end", "environment_error", told("run", error)]
