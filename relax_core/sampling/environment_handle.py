# SPDX-License-Identifier: Apache-2.0
"""The handle of one sample on its environment, wherever that lives, and the one for environments in this process.

Whatever the author's code does wrong comes out as `EnvironmentFailed`, which says the outcome.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Awaitable
from contextlib import nullcontext
from typing import Protocol, TypeVar

from relax_core.api.environment import Action, Environment, Observation, Step, Tool
from relax_core.api.task import Message, Task
from relax_core.api.trajectory import Outcome
from relax_core.sampling.session import Branch, SessionEnded, state_of

T = TypeVar("T")
StepResult = tuple[Step, tuple[Message, ...]]
"""A step, and its observation as messages."""
ResetResult = tuple[tuple[Message, ...], str]
"""Messages, and the environment's name for the state."""


class EnvironmentFailed(Exception):
    """Record the outcome: the environment raised, was too slow, or its process ended."""

    def __init__(self, outcome: Outcome, message: str) -> None:
        super().__init__(message)
        self.outcome = outcome


class EnvironmentHandle(Protocol):
    """The interface of an environment for an episode."""

    tools: tuple[Tool, ...]
    drives: bool
    """It has `run`, not `reset` and `step`."""

    async def reset(self, task: Task, seed: int) -> ResetResult: ...

    async def step(self, action: Action) -> StepResult: ...

    async def run(self, task: Task, seed: int, session: Branch) -> None: ...

    def format_observation(self, observation: Observation | str) -> tuple[Message, ...]: ...

    async def close(self) -> str:
        """Close it; always called, and may be called again. Return what went wrong, or ''."""
        ...


class InProcess:
    """An instance in this process."""

    def __init__(self, environment: Environment, timeout_s: float) -> None:
        self._environment, self._timeout_s = environment, timeout_s
        self.tools = tuple(environment.tools)
        self.drives = environment.drives()
        self.format_observation = environment.format_observation
        self._closed = False

    async def reset(self, task: Task, seed: int) -> ResetResult:
        return await guarded(reset(self._environment, task, seed), self._timeout_s, "reset")

    async def step(self, action: Action) -> StepResult:
        return await guarded(step(self._environment, action), self._timeout_s, "step")

    async def run(self, task: Task, seed: int, session: Branch) -> None:
        await guarded(self._environment.run(task, seed, session), self._timeout_s, "run", session)

    async def close(self) -> str:
        if self._closed:
            return ""
        self._closed = True
        try:
            await guarded(self._environment.close(), self._timeout_s, "close")
        except EnvironmentFailed as failure:
            return str(failure)
        return ""


async def reset(environment: Environment, task: Task, seed: int) -> ResetResult:
    """Reset an instance; give what the policy sees first beside the prompt."""
    observation = await environment.reset(task, seed)
    return () if observation is None else _observed(environment, observation), state_of(observation)


async def step(environment: Environment, action: Action) -> StepResult:
    """Take one step, its observation as messages; silence is none."""
    taken = await environment.step(action)
    return taken, _observed(environment, taken.observation)


def _observed(environment: Environment, observation: Observation | str) -> tuple[Message, ...]:
    content = observation if isinstance(observation, str) else observation.content or observation.messages
    return environment.format_observation(observation) if content else ()


async def guarded(work: Awaitable[T], timeout_s: float, method: str, session: Branch | None = None) -> T:
    """Await the author's code under a deadline, which stands still while the policy takes a turn in the session; 0: it never
    waits. Raises EnvironmentFailed; lets `SessionEnded` pass."""
    if not timeout_s and session is None:
        return await work
    deadline = asyncio.timeout(timeout_s)
    try:
        async with deadline:
            with session.sample.watched(deadline, timeout_s) if session is not None else nullcontext():
                return await work
    except (SessionEnded, EnvironmentFailed):
        raise
    except Exception as error:
        if deadline.expired():
            raise EnvironmentFailed(Outcome.ENVIRONMENT_TIMEOUT, late_text(method, timeout_s)) from error
        raise EnvironmentFailed(Outcome.ENVIRONMENT_ERROR, error_text(method, error)) from error


def late_text(method: str, timeout_s: float) -> str:
    return f"{method} did not return within {timeout_s:g} s of the environment's own time"


def error_text(method: str, error: BaseException) -> str:
    """An error in one line, with the file and line that raised it."""
    trace = traceback.extract_tb(error.__traceback__)
    place = f" ({trace[-1].filename}:{trace[-1].lineno})" if trace else ""
    return f"{method} raised {type(error).__name__}: {error}{place}"
