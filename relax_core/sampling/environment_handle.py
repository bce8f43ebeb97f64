# SPDX-License-Identifier: Apache-2.0
"""One sample's hand on its environment, wherever that lives; here the one for environments in this process.

Whatever the author's code does wrong comes out as `EnvironmentFailed`, which says the outcome.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Awaitable
from typing import Protocol, TypeVar

from relax_core.api.environment import Action, Environment, Observation, Step, Tool
from relax_core.api.task import Message, Task
from relax_core.api.trajectory import Outcome
from relax_core.sampling.session import Branch, SessionEnded, state_of

T = TypeVar("T")
Answer = tuple[Step, tuple[Message, ...]]
"""A step, and its observation as messages."""
Shown = tuple[tuple[Message, ...], str]
"""Messages, and the environment's name for the state."""


class EnvironmentFailed(Exception):
    """Record the outcome: the environment raised, was too slow, or its process ended."""

    def __init__(self, outcome: Outcome, message: str) -> None:
        super().__init__(message)
        self.outcome = outcome


class EnvironmentHandle(Protocol):
    """What an episode needs of an environment."""

    tools: tuple[Tool, ...]
    drives: bool
    """It has `run`, not `reset` and `step`."""

    async def reset(self, task: Task, seed: int) -> Shown: ...

    async def step(self, action: Action) -> Answer: ...

    async def run(self, task: Task, seed: int, session: Branch) -> None: ...

    def format_observation(self, observation: Observation | str) -> tuple[Message, ...]: ...

    async def close(self) -> str:
        """Always called, may be called again; what went wrong, or ''."""
        ...


class InProcess:
    """An instance in this process."""

    def __init__(self, environment: Environment, timeout_s: float) -> None:
        self._environment, self._timeout_s = environment, timeout_s
        self.tools = tuple(environment.tools)
        self.drives = environment.drives()
        self._closed = False

    async def reset(self, task: Task, seed: int) -> Shown:
        return await guarded(reset(self._environment, task, seed), self._timeout_s, "reset")

    async def step(self, action: Action) -> Answer:
        return await guarded(step(self._environment, action), self._timeout_s, "step")

    async def run(self, task: Task, seed: int, session: Branch) -> None:
        await driven(self._environment.run(task, seed, session), self._timeout_s, session)

    def format_observation(self, observation: Observation | str) -> tuple[Message, ...]:
        return self._environment.format_observation(observation)

    async def close(self) -> str:
        if self._closed:
            return ""
        self._closed = True
        try:
            await guarded(self._environment.close(), self._timeout_s, "close")
        except EnvironmentFailed as failure:
            return str(failure)
        return ""


async def reset(environment: Environment, task: Task, seed: int) -> Shown:
    """What the policy sees first beside the prompt."""
    observation = await environment.reset(task, seed)
    return () if observation is None else _said(environment, observation), state_of(observation)


async def step(environment: Environment, action: Action) -> Answer:
    """One step, its observation as messages; silence is none."""
    answer = await environment.step(action)
    return answer, _said(environment, answer.observation)


def _said(environment: Environment, observation: Observation | str) -> tuple[Message, ...]:
    words = observation if isinstance(observation, str) else observation.content or observation.messages
    return environment.format_observation(observation) if words else ()


async def guarded(work: Awaitable[T], timeout_s: float, what: str) -> T:
    """The author's code under a deadline; 0: it never waits. Raises EnvironmentFailed; lets `SessionEnded` pass."""
    if not timeout_s:
        return await work
    deadline = asyncio.timeout(timeout_s)
    try:
        async with deadline:
            return await work
    except SessionEnded:
        raise
    except Exception as error:
        if deadline.expired():
            raise EnvironmentFailed(Outcome.ENVIRONMENT_TIMEOUT, late(what, timeout_s)) from error
        raise EnvironmentFailed(Outcome.ENVIRONMENT_ERROR, told(what, error)) from error


async def driven(work: Awaitable[None], timeout_s: float, session: Branch) -> None:
    """`run` under a deadline that stands still while the policy speaks."""
    deadline = asyncio.timeout(timeout_s)
    try:
        async with deadline:
            with session.sample.watched(deadline, timeout_s):
                await work
    except (SessionEnded, EnvironmentFailed):
        raise
    except Exception as error:
        if deadline.expired():
            raise EnvironmentFailed(Outcome.ENVIRONMENT_TIMEOUT, late("run", timeout_s)) from error
        raise EnvironmentFailed(Outcome.ENVIRONMENT_ERROR, told("run", error)) from error


def late(what: str, timeout_s: float) -> str:
    return f"{what} did not return within {timeout_s:g} s of the environment's own time"


def told(what: str, error: BaseException) -> str:
    """An error in one line, with the file and line that raised it."""
    trace = traceback.extract_tb(error.__traceback__)
    place = f" ({trace[-1].filename}:{trace[-1].lineno})" if trace else ""
    return f"{what} raised {type(error).__name__}: {error}{place}"
