# SPDX-License-Identifier: Apache-2.0
"""The author's reward in its killable process, and rewards that are functions passed from Python.

A unit is scored at once: a sample, a group or a batch. A function (`relax.train(..., rewards=[fn])`) has a name in the
catalogue of every process that reads the configuration; only the reward's own process ever loads and calls it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn, TypeAlias

from relax_core.api.errors import ConfigError, PluginError
from relax_core.api.reward import BatchReward, GroupReward, Reward
from relax_core.api.task import Task
from relax_core.api.trajectory import Trajectory
from relax_core.engines.model_rpc import ModelRpcClient
from relax_core.registry.catalogue import Catalogue
from relax_core.rewards.result import error_result, flatten, revive, score_result, where
from relax_core.rpc.isolated_host import DONE, IsolatedHost

FUNCTION = "reward-function"
"""Component kind of a function passed from Python; its options hold the cloudpickle, read from the parent's pipe."""

Unit: TypeAlias = list[tuple[Task, Trajectory]]


class RewardHost(IsolatedHost):
    """Scores units with one reward. Errors of the author become results in here, where their frames are."""

    def open(self) -> tuple[str, str, tuple[str, ...]]:
        """Build the reward; return its form (sample, batch or group), the place of its method, and the engine pools that
        it asks."""
        self._reward = reward = self._build_reward()
        self._score: Callable[..., Any]
        if isinstance(reward, GroupReward):
            self._form, self._score = "group", reward.score_group
        elif isinstance(reward, BatchReward):
            self._form, self._score = "batch", reward.score_batch
        else:
            self._form, self._score = "sample", reward.score
        self.concurrent = inspect.iscoroutinefunction(self._score)
        needs = tuple(reward.needs_engines)
        if needs:
            if not self.concurrent:
                fix = "it asks an engine pool, which takes time: write it as `async def`"
                raise PluginError(f"reward {self.component.name}", f"{where(self._score)} is no coroutine; {fix}")
            reward.engines = {name: ModelRpcClient(self.parent, name) for name in needs}
        return self._form, where(self._score), needs

    def unpack(self, payload: Any) -> list[Unit]:
        tasks, samples, units = payload
        revived = [(tasks[task], revive(flat)) for task, flat in samples]
        return [[revived[position] for position in unit] for unit in units]

    def handle(self, item: Unit) -> Any:
        if self._form == "sample":
            return self._score(*item[0])
        trajectories = [trajectory for _, trajectory in item]
        if self._form == "group":
            return self._score(item[0][0], trajectories)
        return self._score([task for task, _ in item], trajectories)

    def pack_result(self, item: Unit, result: Any) -> list[Any]:
        results = [result] if self._form == "sample" else list(result)
        if len(results) != len(item):
            raise ValueError(f"returned {len(results)} scores for {len(item)} samples; return one each, in order")
        return [score_result(one, where(self._score)).packed() for one in results]

    def pack_error(self, item: Unit, error: BaseException) -> tuple[str, list[Any]]:
        return DONE, [error_result(error, self._score).packed()] * len(item)

    def _build_reward(self) -> Any:
        if self.component.kind != FUNCTION:
            return self.build(self.component)
        import cloudpickle

        return FunctionReward(cloudpickle.loads(self.component.options["function"]))


class FunctionReward(Reward):
    """A plain `fn(task, trajectory)` as a reward."""

    def __init__(self, function: Callable[[Task, Trajectory], Any]) -> None:
        super().__init__()
        self.score = function  # type: ignore[method-assign, assignment]

    def score(self, task: Task, trajectory: Trajectory) -> Any:
        raise NotImplementedError


class PassedFunction(Reward):
    """A stand-in for a function where its name must be known."""

    def score(self, task: Task, trajectory: Trajectory) -> NoReturn:
        raise NotImplementedError("a reward passed from Python is called in its own process only")


def pack(functions: Iterable[Callable[..., Any]]) -> dict[str, bytes]:
    """Pickle functions by name, as they travel over their parent's own pipe. Raises ConfigError for two of one name."""
    import cloudpickle

    packed: dict[str, bytes] = {}
    for function in functions:
        name = function.__name__.replace("_", "-").strip("-<>") or "function"
        if name in packed:
            raise ConfigError("rewards", f"two functions named {name!r}", "give each its own name")
        packed[name] = cloudpickle.dumps(function)
    return packed


def announce(names: Iterable[str], catalogue: Catalogue) -> None:
    """Let a configuration name passed functions."""
    for name in names:
        catalogue.add("reward", name, type(PassedFunction.__name__, (PassedFunction,), {}))


def pack_units(units: Sequence[Unit]) -> tuple[list[Task], list[list[Any]], list[list[int]]]:
    """Put units on the wire: each task once, each sample flat, units as positions in them."""
    tasks: dict[int, tuple[int, Task]] = {}
    samples: list[list[Any]] = []
    positions: list[list[int]] = []
    for unit in units:
        start = len(samples)
        for task, trajectory in unit:
            number, _ = tasks.setdefault(id(task), (len(tasks), task))
            samples.append([number, flatten(trajectory)])
        positions.append(list(range(start, len(samples))))
    return [task for _, task in tasks.values()], samples, positions
