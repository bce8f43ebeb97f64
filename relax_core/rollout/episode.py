# SPDX-License-Identifier: Apache-2.0
"""One episode: a task, an environment and the policy, until one of them is done. The result is always a trajectory.

What fails on the way becomes its outcome; the environment's `close` runs whatever happens.
"""

from __future__ import annotations

from relax_core.api.family import ModelFamily, Rendered
from relax_core.api.outcome import Outcome
from relax_core.api.task import Message, Task
from relax_core.api.trajectory import Trajectory
from relax_core.rollout.completion import Generate
from relax_core.rollout.environment_handle import EnvironmentFailed, EnvironmentHandle
from relax_core.rollout.session import Branch, Ended, Limits, Sample

__all__ = ["Limits", "run_episode"]


async def run_episode(
    task: Task,
    prompt: Rendered,
    seed: int,
    environment: EnvironmentHandle,
    family: ModelFamily,
    generate: Generate,
    limits: Limits,
) -> Trajectory:
    """Play one sample. `prompt` is the task's prompt rendered with the environment's tools, once for all its samples."""
    sample = Sample(family, generate, limits, environment.format_observation, environment.tools)
    session = sample.open(task.prompt, prompt, seed)
    try:
        if environment.drives:
            await environment.run(task, seed, session)
        else:
            await _take_turns(task, seed, environment, session, sample)
    except Ended:
        pass  # why is in the sample
    except EnvironmentFailed as failure:
        sample.end(failure.outcome, str(failure))
    finally:
        left = await environment.close()
        if left:
            sample.info["close_error"] = left
    if sample.broken is not None:
        raise sample.broken
    return sample.trajectory()


async def _take_turns(task: Task, seed: int, environment: EnvironmentHandle, session: Branch, sample: Sample) -> None:
    session.append(await environment.reset(task, seed))
    while True:
        action = await session.generate()
        if sample.outcome is Outcome.TRUNCATED:
            return
        if action.parse_error:
            session.append((Message("tool", action.parse_error),))
            continue
        step, messages = await environment.step(action)
        session.append(messages)
        if step.reward is not None:
            session.reward(step.reward)
        if step.info:
            sample.info.update(step.info)
        if step.done:
            return
