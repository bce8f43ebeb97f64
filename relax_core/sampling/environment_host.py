# SPDX-License-Identifier: Apache-2.0
"""Environments in a killable process: many instances of one environment, each with the number of its session.

Errors and deadlines of an instance travel back as data, so that they cost its sample only. A call that blocks the event loop
is the parent's to notice and to kill.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from itertools import count
from typing import Any

from relax_core.api.environment import Action, Environment, Observation
from relax_core.api.task import Message, Task
from relax_core.engines.model_rpc import ModelRpcClient
from relax_core.rpc.isolated_host import IsolatedHost, ParentChannel
from relax_core.sampling.environment_handle import EnvironmentFailed, error_text, guarded, reset, step
from relax_core.sampling.session import SessionEnded, state_of

SESSION = "session"
"""The parent's handler of what driving environments ask of their samples."""


class EnvironmentHost(IsolatedHost):
    """Holds the instances. Each is made by `reset` or `run`, and gone after `close`."""

    async def open(self) -> tuple[str, ...]:
        """Build the options and run the author's shared set-up, once a process; return the engine pools that it asks."""
        self._prototype: Environment = self.build(self.component)
        self._shared: object = await type(self._prototype).open(self._prototype.options)
        self._instances: dict[int, Environment] = {}
        self._running: dict[int, asyncio.Task[Any]] = {}
        return tuple(self._prototype.needs_engines)

    async def reset(self, number: int, task: Task, seed: int, timeout_s: float) -> list[Any]:
        try:
            instance = self._make(number)
        except Exception as error:
            return ["environment_error", error_text("making it", error)]
        return await _outcome(guarded(reset(instance, task, seed), timeout_s, "reset"))

    async def step(self, number: int, action: Action, timeout_s: float) -> list[Any]:
        return await _outcome(guarded(step(self._instances[number], action), timeout_s, "step"))

    async def run(self, number: int, task: Task, seed: int) -> list[Any]:
        """Let an instance drive its sample; the parent has done all that it asked for when this returns."""
        running = asyncio.current_task()
        if running is not None:
            self._running[number] = running
        try:
            instance = self._make(number)
            await instance.run(task, seed, RemoteSession(self.parent, number, instance))
            ended = ["", None]
        except SessionEnded:
            ended = ["", None]
        except Exception as error:
            ended = ["environment_error", error_text("run", error)]
        await self.parent.call(SESSION, number, "end", 0)
        return ended

    async def close(self, number: int, timeout_s: float) -> list[Any]:
        instance = self._instances.pop(number, None)
        if running := self._running.pop(number, None):
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        return ["", None] if instance is None else await _outcome(guarded(instance.close(), timeout_s, "close"))

    def _make(self, number: int) -> Environment:
        instance = type(self._prototype)(self._prototype.options)
        instance.shared = self._shared
        instance.engines = {name: ModelRpcClient(self.parent, name) for name in instance.needs_engines}
        self._instances[number] = instance
        return instance


class RemoteSession:
    """`api.Session` of a driving environment: one branch, by number, of the sample that the parent holds."""

    def __init__(self, parent: ParentChannel, number: int, environment: Environment) -> None:
        self._parent, self._number, self._environment = parent, number, environment
        self._branch = 0
        self._branches = count(1)

    async def generate(self, max_new_tokens: int | None = None, stop: tuple[str, ...] = ()) -> Action:
        action: Action | None = await self._parent.call(
            SESSION, self._number, "generate", self._branch, max_new_tokens, stop
        )
        if action is None:
            raise SessionEnded("the sample has ended")
        return action

    def observe(self, observation: Observation | str) -> None:
        self._notify("observe", self._environment.format_observation(observation), state_of(observation))

    def fork(self) -> RemoteSession:
        return self._branch_off("fork")

    def restart(self, prompt: str | tuple[Message, ...]) -> RemoteSession:
        return self._branch_off("restart", prompt)

    def reward(self, value: float) -> None:
        self._notify("reward", float(value))

    def _branch_off(self, request: str, *args: Any) -> RemoteSession:
        other = RemoteSession(self._parent, self._number, self._environment)
        other._branch, other._branches = next(self._branches), self._branches
        self._notify(request, other._branch, *args)
        return other

    def _notify(self, request: str, *args: Any) -> None:
        self._parent.notify(SESSION, self._number, request, self._branch, *args)


async def _outcome(work: Awaitable[Any]) -> list[Any]:
    """[outcome, message] of a failure, or ['', result]."""
    try:
        return ["", await work]
    except EnvironmentFailed as failure:
        return [failure.outcome.value, str(failure)]
