# SPDX-License-Identifier: Apache-2.0
"""Components whose methods return the value of an expression, given by the task's metadata or in the class."""

from __future__ import annotations

import asyncio
from typing import Any, NoReturn

import numpy
import torch

from relax_core import api
from relax_core.api.reward import BatchReward, GroupReward, Reward, Unreadable


class Speechless(Exception):
    """An exception that can't be shown."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


class Unshowable:
    """A value that can't be shown."""

    def __repr__(self) -> str:
        raise RuntimeError("no words")


class Loud(float):
    """A number whose own methods no process but its author's may run."""

    def _refuse(self, *args: object) -> NoReturn:
        raise RuntimeError("ran a method of an author's number")

    __repr__ = __abs__ = __mul__ = __rmul__ = __add__ = __radd__ = __eq__ = __hash__ = _refuse  # type: ignore[assignment]


class Said(str):
    """A text that stays of this class when it is converted to a text."""

    def __str__(self) -> str:
        return self


def raised(error: BaseException) -> NoReturn:
    raise error


NAMES: dict[str, Any] = {
    **{name: getattr(api, name) for name in api.__all__}, "numpy": numpy, "torch": torch, "asyncio": asyncio, "raised": raised,
    "Speechless": Speechless, "Unshowable": Unshowable, "Loud": Loud, "Said": Said, "Unreadable": Unreadable,
}  # fmt: skip


def value(expression: str, **names: Any) -> Any:
    return eval(expression, {**NAMES, **names})  # noqa: S307 expressions of the tests' own table


class OddEnvironment(api.Environment):
    """Ends after one turn, unless a method returns something else."""

    gives_reward = True
    odd: Any = {}

    async def reset(self, task: api.Task, seed: int) -> Any:
        self.odd = task.metadata
        return value(self.odd["reset"]) if "reset" in self.odd else api.Observation("hi")

    async def step(self, action: api.Action) -> Any:
        return value(self.odd["step"]) if "step" in self.odd else api.Step("end", True, 1.0)

    def format_observation(self, observation: Any) -> Any:
        return value(self.odd["format"]) if "format" in self.odd else super().format_observation(observation)


class OddDriver(api.Environment):
    """Takes one turn, then does what the task says."""

    async def run(self, task: api.Task, seed: int, session: Any) -> None:
        await session.generate()
        scope: dict[str, Any] = {**NAMES, "session": session}
        exec(f"async def odd():\n    {task.metadata['does']}", scope)  # noqa: S102 statements of the tests' own table
        await scope["odd"]()
        await session.generate()


class OddReward(Reward):
    """Scores one sample."""

    def score(self, task: Any, trajectory: Any) -> Any:
        return value(task.metadata["sample"])


class OddGroupReward(GroupReward):
    """Scores a group."""

    def score_group(self, task: Any, trajectories: Any) -> Any:
        return value(task.metadata["group"])


class OddBatchReward(BatchReward):
    """Scores a batch."""

    def score_batch(self, tasks: Any, trajectories: Any) -> Any:
        return value(tasks[0].metadata["batch"])
