# SPDX-License-Identifier: Apache-2.0
"""The session that a driving environment holds in its own process: what it asks goes down a line, turns come back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from relax_core.api.environment import Action, Observation
from relax_core.api.task import Message
from relax_core.rollout.session import Ended, state_of


class Line:
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
            future.set_exception(Ended("the sample has ended"))
        else:
            future.set_result(action)

    def _wake(self, work: asyncio.Future[None]) -> None:
        self._news.set()


class RemoteSession:
    """One branch, by number."""

    def __init__(self, line: Line, branch: int) -> None:
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
