# SPDX-License-Identifier: Apache-2.0
"""Plain functions as rewards: the component `function`, and functions passed from Python.

A function is called as `fn(task, trajectory)`. A function with a parameter `completions` is called as in TRL, with a batch
of samples: `prompts` and `completions` are lists of texts, or of lists of messages with `role` and `content`. It gets the
columns of the tasks that its parameters name, each as a list; `**kwargs` gets all columns.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, NoReturn

from pydantic import field_validator

from relax_core.api.files import load_function
from relax_core.api.options import Options
from relax_core.api.reward import BatchReward, Reward
from relax_core.api.task import Message, Task
from relax_core.api.trajectory import Trajectory

BATCH_PARAMETER = "completions"


class FunctionOptions(Options):
    """Options of the reward `function`."""

    function: str | Path
    """Function that judges samples, `file.py:name` or `module:name`; called as `fn(task, trajectory)`, or as in TRL if
    it has a parameter `completions`."""

    @field_validator("function")
    @classmethod
    def _exists(cls, place: str | Path) -> str | Path:
        """Check that the function exists without running its file."""
        where, _, name = str(place).rpartition(":")
        if not where or not name.isidentifier():
            raise ValueError("name a function as file.py:name or module:name")
        if not where.endswith(".py"):
            if importlib.util.find_spec(where.partition(".")[0]) is None:
                raise ValueError(f"there is no module {where}")
            return place
        try:
            body = ast.parse(Path(where).read_bytes()).body
        except (OSError, SyntaxError, ValueError) as error:
            raise ValueError(f"{where} can't be read: {error}") from error
        found = [node.name for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        assigned = any(
            isinstance(node, ast.Assign | ast.AnnAssign | ast.ImportFrom | ast.If | ast.Try) for node in body
        )
        if name not in found and not assigned:  # an assignment or a conditional definition may make the function
            raise ValueError(f"{where} has no function {name!r}; it has {', '.join(found) or 'none'}")
        return place


class FunctionReward(Reward[FunctionOptions]):
    """A function of yours, in a Python file or module."""

    def adapted(self) -> Reward[Any] | BatchReward[Any]:
        """Import the function and return the reward that calls it. Raises ConfigError."""
        return reward_of(load_function("rewards.function", str(self.options.function)))

    def score(self, task: Task, trajectory: Trajectory) -> NoReturn:
        raise NotImplementedError("the host of a reward calls `adapted`")


class _PerSample(Reward):
    """A reward that calls `fn(task, trajectory)`."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.score = function  # type: ignore[method-assign]

    def score(self, task: Task, trajectory: Trajectory) -> NoReturn:
        raise NotImplementedError


class _PerBatch(BatchReward):
    """A reward that calls `fn(prompts=..., completions=..., column=...)`."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        parameters = inspect.signature(function).parameters.values()
        every = any(one.kind is one.VAR_KEYWORD for one in parameters)
        names = {one.name for one in parameters if one.kind is not one.VAR_KEYWORD}

        def arguments(tasks: Sequence[Task], trajectories: Sequence[Trajectory]) -> dict[str, object]:
            columns = dict.fromkeys(name for task in tasks for name in task.metadata)
            if any(task.answer is not None for task in tasks):
                columns["answer"] = None
            given: dict[str, object] = {name: [task.column(name) for task in tasks] for name in columns}
            given["prompts"] = [
                task.prompt if isinstance(task.prompt, str) else [_message(message) for message in task.prompt]
                for task in tasks
            ]
            given[BATCH_PARAMETER] = [
                trajectory.response if isinstance(task.prompt, str)
                else [_message(message) for message in trajectory.messages[len(task.prompt) :]]
                for task, trajectory in zip(tasks, trajectories, strict=True)
            ]  # fmt: skip
            return given if every else {name: value for name, value in given.items() if name in names}

        if inspect.iscoroutinefunction(function):

            @wraps(function)
            async def score_batch(tasks: Sequence[Task], trajectories: Sequence[Trajectory]) -> object:
                return await function(**arguments(tasks, trajectories))
        else:

            @wraps(function)
            def score_batch(tasks: Sequence[Task], trajectories: Sequence[Trajectory]) -> object:
                return function(**arguments(tasks, trajectories))

        self.score_batch = score_batch  # type: ignore[method-assign]

    def score_batch(self, tasks: Sequence[Task], trajectories: Sequence[Trajectory]) -> Any:
        raise NotImplementedError


def reward_of(function: Callable[..., Any]) -> Reward[Any] | BatchReward[Any]:
    """Return the reward that calls a plain function, for one sample or as in TRL for a batch."""
    try:
        batch = BATCH_PARAMETER in inspect.signature(function).parameters
    except (TypeError, ValueError):  # a function written in C has no signature
        batch = False
    return _PerBatch(function) if batch else _PerSample(function)


def _message(message: Message) -> dict[str, object]:
    return {"role": message.role, "content": message.text}
