# SPDX-License-Identifier: Apache-2.0
"""One episode: a task, an environment and the policy, until one of them is done. The result is always a trajectory.

What fails on the way becomes its outcome; the environment's `close` runs whatever happens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

from relax_core.api.family import ModelFamily, Rendered
from relax_core.api.task import Message, Task
from relax_core.api.trajectory import Outcome, Trajectory
from relax_core.data.media_pipeline import MediaFor
from relax_core.engines.requests import Generate, GenerateAll, GenerateCall, singly
from relax_core.sampling.environment_handle import EnvironmentFailed, EnvironmentHandle
from relax_core.sampling.session import ENGINE_FAILS, Branch, Limits, Sample, SessionEnded, state_of

__all__ = ["Limits", "run_answers", "run_episode"]


async def run_episode(
    task: Task,
    prompt: Rendered,
    seed: int,
    environment: EnvironmentHandle,
    family: ModelFamily,
    generate: Generate,
    limits: Limits,
    media: MediaFor | None = None,
) -> Trajectory:
    """Play one sample. `prompt` is the task's prompt rendered with the environment's tools, once for all its samples."""
    sample = Sample(family, generate, limits, environment.format_observation, environment.tools, media)
    session = Branch(sample, task.prompt, prompt, seed)
    try:
        if environment.drives:
            await environment.run(task, seed, session)
        else:
            await _take_turns(task, seed, environment, session, sample)
    except SessionEnded:
        pass  # the sample says why
    except EnvironmentFailed as failure:
        sample.end(failure.outcome, str(failure))
    finally:
        left = await environment.close()
        if left:
            sample.info["close_error"] = left
    if sample.broken is not None:
        raise sample.broken
    return sample.trajectory()


async def run_answers(
    task: Task,
    prompt: Rendered,
    seeds: Sequence[int],
    family: ModelFamily,
    generate: GenerateAll,
    limits: Limits,
    ended: Callable[[], None],
) -> list[Trajectory]:
    """Play samples whose environment is `SingleTurn`, which has nothing to say: one turn each, all asked together.

    A sample is what `run_episode` makes of it. `ended` is called for each as it ends.
    """
    samples = [Sample(family, singly(generate), limits, lambda observation: ()) for _ in seeds]
    asked: list[tuple[Branch, GenerateCall]] = []
    for sample, seed in zip(samples, seeds, strict=True):
        branch = Branch(sample, task.prompt, prompt, seed)
        with suppress(SessionEnded):
            asked.append((branch, branch.begin()._replace(ended=ended)))
    try:
        completions = await generate([call for _, call in asked]) if asked else ()
    except ENGINE_FAILS as error:
        for branch, _ in asked:
            branch.sample.engine_failed(error)
    else:
        for (branch, call), completion in zip(asked, completions, strict=True):
            with suppress(SessionEnded):
                branch.take(call, completion)
    return [sample.trajectory() for sample in samples]


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
            sample.info.update(step.info)
        if step.done:
            return
