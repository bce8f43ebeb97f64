# SPDX-License-Identifier: Apache-2.0
"""One episode: the policy and an environment take turns on a task. A failure, too, results in a trajectory.

Errors and missed deadlines of the environment's code are raised as `EnvironmentFailed` and become the trajectory's
outcome. The environment's `close` always runs.
"""

from __future__ import annotations

import asyncio
import math
import traceback
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Hashable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import ClassVar, TypeVar

from relax_core.api.environment import Action, Environment, Observation, PromptRefused, Step
from relax_core.api.errors import PoolFailed
from relax_core.api.family import ModelFamily, Rendered
from relax_core.api.media import MediaPipeline
from relax_core.api.options import Options
from relax_core.api.task import Message, Task
from relax_core.api.trajectory import Outcome, Trajectory
from relax_core.data.row_tools import COLUMN as TOOLS, row_tools
from relax_core.engines.requests import SAMPLING, Generate, SamplingParams
from relax_core.registry.error_text import innermost, message_of
from relax_core.registry.shapes import WrongShape, checked, returned_by, reward_number
from relax_core.rpc.isolated_pool import SessionLost
from relax_core.sampling.session import ENGINE_FAILS, Branch, Limits, Sample, SessionEnded, state_of

T = TypeVar("T")
StepResult = tuple[Step, tuple[Message, ...]]
"""A step of the environment, and the step's observation as messages."""
ResetResult = tuple[tuple[Message, ...], str]
"""The first observation as messages, and the environment's name for the state (may be empty)."""


async def run_episode(
    task: Task, prompt: Rendered, seed: int, environment: EnvironmentHandle, family: ModelFamily, generate: Generate,
    limits: Limits, media: MediaPipeline | None = None, media_owner: Hashable = None,
    sampling: SamplingParams = SAMPLING, place: int = 0,
) -> Trajectory:  # fmt: skip
    """Play one sample and return its trajectory.

    `prompt` is the task's prompt rendered with the environment's tools; all samples of the task share it. `place` is
    the index of the sample in its group. Raises errors for which neither the sample nor its environment is to blame,
    such as PoolFailed.
    """
    sample = Sample(
        family, generate, limits, environment.format_observation, environment.tools, media, media_owner, sampling, place
    )
    sample.row_tools = row_tools(task.column(TOOLS))
    session, now = Branch(sample, task.prompt, prompt, seed), asyncio.get_running_loop().time
    began = sample.began = now()
    sample.total_s = environment.total_timeout_s or math.inf
    try:
        if environment.drives:
            await environment.run(task, seed, session)
        else:
            await _take_turns(task, seed, environment, session, sample)
    except SessionEnded:
        pass  # the sample has recorded the reason
    except (EnvironmentFailed, PromptRefused) as failure:
        sample.end(failure.outcome, str(failure))
    except WrongShape as error:
        sample.end(Outcome.ENVIRONMENT_ERROR, str(error))
    finally:
        left = await environment.close()
        if left:
            sample.info["close_error"] = left
        sample.environment_s = now() - began - sample.waited_s
    if sample.broken is not None:
        raise sample.broken
    return sample.trajectory()


async def run_answers(
    task: Task, prompt: Rendered, seeds: Sequence[int], samplings: Sequence[SamplingParams], family: ModelFamily,
    generate: Generate, limits: Limits, on_end: Callable[[], None],
) -> list[Trajectory]:  # fmt: skip
    """Play one-turn samples (environment `SingleTurn`) and generate all their turns in one call.

    The trajectories equal those of `run_episode`. `on_end` is called for each sample as it ends.
    """
    sample = Sample(family, generate, limits, lambda observation: (), sampling=samplings[0])
    branch, failure = Branch(sample, task.prompt, prompt, seeds[0]), None
    try:
        with sample.charged():
            requests = branch.begin_answers(seeds, samplings)
    except SessionEnded:
        return [sample.trajectory()] * len(seeds)
    for request in requests:
        request.on_end = on_end
    try:
        await generate(requests)
    except PoolFailed:
        raise
    except ENGINE_FAILS as error:
        failure = error
    sample.branches.clear()  # breaks the reference cycle between sample and branch
    return [branch.answer(request, failure) for request in requests]


async def _take_turns(task: Task, seed: int, environment: EnvironmentHandle, session: Branch, sample: Sample) -> None:
    session.append(*await environment.reset(task, seed))
    while True:
        action = await session.generate()
        if sample.outcome is Outcome.TRUNCATED:
            return
        if action.parse_error:
            session.append((Message("tool", action.parse_error),))
            continue
        step, messages = await environment.step(action)
        session.append(messages, state_of(step.observation))
        if step.reward is not None:
            session.reward(step.reward)
        if step.info:
            session.note(step.info)
        if step.done:
            return
        if sample.time_left_s <= 0:
            raise EnvironmentFailed(Outcome.ENVIRONMENT_TIMEOUT, total_text(sample.total_s))


# -- the environment of one sample ------------------------------------------------------------------------------------


class EnvironmentFailed(Exception):
    """A failure of a sample's environment: its code raised or missed a deadline, or its process ended."""

    def __init__(self, outcome: Outcome, message: str) -> None:
        super().__init__(message)
        self.outcome = outcome


class EnvironmentHandle(ABC):
    """One sample's environment, in this process or another: `reset -> step ... -> close`, or `run -> close`.

    `environment` is the instance, or a prototype of the same class. All methods but `close` raise EnvironmentFailed.
    """

    def __init__(self, environment: Environment, timeout_s: float, total_timeout_s: float = 0.0) -> None:
        self.tools, self.drives = tuple(environment.tools), environment.drives()
        self.format_observation = environment.format_observation
        self._environment, self._timeout_s, self._closed = environment, timeout_s, False
        self.total_timeout_s = total_timeout_s
        self.lost: SessionLost | None = None
        """Set if the environment's process broke, or if a different sample in it may have caused the failure."""

    @abstractmethod
    async def reset(self, task: Task, seed: int) -> ResetResult: ...

    @abstractmethod
    async def step(self, action: Action) -> StepResult: ...

    @abstractmethod
    async def run(self, task: Task, seed: int, session: Branch) -> None:
        """Execute the `run` of an environment that `drives`: it plays the whole sample."""

    @abstractmethod
    async def _close(self) -> None: ...

    async def close(self) -> str:
        """Close the environment once; return the error text of a failing `close`, or an empty string."""
        if not self._closed:
            self._closed = True
            try:
                await self._close()
            except EnvironmentFailed as failure:
                return str(failure)
        return ""


class InProcess(EnvironmentHandle):
    """A handle of an instance in this process."""

    async def reset(self, task: Task, seed: int) -> ResetResult:
        return await guarded(reset(self._environment, task, seed), self._timeout_s, "reset")

    async def step(self, action: Action) -> StepResult:
        return await guarded(step(self._environment, action), self._timeout_s, "step")

    async def run(self, task: Task, seed: int, session: Branch) -> None:
        await guarded(self._environment.run(task, seed, session), self._timeout_s, "run", session)

    async def _close(self) -> None:
        await guarded(self._environment.close(), self._timeout_s, "close")


class SingleTurn(Environment[Options]):
    """The default environment: the policy answers the prompt in one turn, and rewards judge the answer."""

    in_process: ClassVar[bool] = True
    never_waits: ClassVar[bool] = True
    """True: calls have no deadline, since they never wait, and thousands of timers per step would be slow."""

    async def reset(self, task: Task, seed: int) -> Observation | None:
        return None

    async def step(self, action: Action) -> Step:
        return Step("", done=True)


async def reset(environment: Environment, task: Task, seed: int) -> ResetResult:
    """Reset an instance; return its first observation as messages, and its name for the state it is in.

    Raises WrongShape if the environment returned anything else.
    """
    observation = await environment.reset(task, seed)
    checked(observation, Observation | str | None, returned_by(environment.reset))
    return () if observation is None else _observed(environment, observation), state_of(observation)


async def step(environment: Environment, action: Action) -> StepResult:
    """Take one step; return the step, and its observation as messages (no message for an empty observation).

    Raises WrongShape if the environment returned anything else.
    """
    taken = await environment.step(action)
    checked(taken, Step, returned_by(environment.step))
    reward = None if taken.reward is None else reward_number(taken.reward, f"{returned_by(environment.step)}.reward")
    taken = replace(taken, done=bool(taken.done), reward=reward)
    return taken, _observed(environment, taken.observation)


def _observed(environment: Environment, observation: Observation | str) -> tuple[Message, ...]:
    content = observation if isinstance(observation, str) else observation.content or observation.messages
    messages = environment.format_observation(observation) if content else ()
    return tuple(checked(messages, tuple[Message, ...], returned_by(environment.format_observation)))


async def guarded(work: Awaitable[T], timeout_s: float, method: str, session: Branch | None = None) -> T:
    """Await the environment's code under a deadline, which stands still while the policy takes a turn in `session`.

    Errors of the code, except SessionEnded, are raised as EnvironmentFailed. With `timeout_s` 0 and no session, the
    code has no deadline and its errors are raised unchanged.
    """
    if not timeout_s and session is None:
        return await work
    deadline = asyncio.timeout(timeout_s if session is None else min(timeout_s, session.sample.time_left_s))
    try:
        async with deadline:
            with session.sample.watched(deadline, timeout_s) if session is not None else nullcontext():
                return await work
    except (SessionEnded, EnvironmentFailed):
        raise
    except PromptRefused as refused:
        raise EnvironmentFailed(refused.outcome, str(refused)) from refused
    except (asyncio.CancelledError, SystemExit) as error:  # of a task that the code awaited, or of `sys.exit`
        if getattr(asyncio.current_task(), "cancelling", int)():
            raise
        raise EnvironmentFailed(Outcome.ENVIRONMENT_ERROR, error_text(method, error)) from error
    except WrongShape as error:
        place = innermost(error)
        text = f"{error} ({place})" if place else str(error)
        raise EnvironmentFailed(Outcome.ENVIRONMENT_ERROR, text) from error
    except Exception as error:
        if deadline.expired():
            in_all = session is not None and session.sample.time_left_s <= 0
            text = total_text(session.sample.total_s) if session and in_all else late_text(method, timeout_s)
            raise EnvironmentFailed(Outcome.ENVIRONMENT_TIMEOUT, text) from error
        raise EnvironmentFailed(Outcome.ENVIRONMENT_ERROR, error_text(method, error)) from error


def late_text(method: str, timeout_s: float) -> str:
    return f"{method} did not return within {timeout_s:g} s of the environment's own time"


def total_text(total_s: float) -> str:
    return f"all calls together took more than the {total_s:g} s of the environment's `total_timeout_s`"


def error_text(method: str, error: BaseException) -> str:
    """Describe an error in one line, with the author's line that led to it, or else the line that raised it."""
    trace = traceback.extract_tb(error.__traceback__)
    place = innermost(error) or "".join(f"{frame.filename}:{frame.lineno}" for frame in trace[-1:])
    return f"{method} raised {type(error).__name__}: {message_of(error)}{f' ({place})' * bool(place)}"
