# SPDX-License-Identifier: Apache-2.0
"""The author's reward in its killable process, and rewards that are functions passed from Python.

A unit is scored at once: a sample, a group or a batch. A function (`relax.train(..., rewards=[fn])`) has a name in the
catalogue of every process that reads the configuration; only the reward's own process ever loads and calls it.

The result of one reward for one sample: a finite score, or how it failed and where in the author's code.

Results and trajectories travel as plain lists: they are packed in C, where dataclasses take several calls of Python an
object, and a step sends hundreds of samples.
"""

from __future__ import annotations

import inspect
import math
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeAlias

from relax_core.api.errors import ConfigError, DeadlineExceeded, InfrastructureError, PluginError
from relax_core.api.reward import BatchReward, GroupReward, Reward, Score
from relax_core.api.task import Message, Task
from relax_core.api.trajectory import Node, Outcome, Trajectory
from relax_core.engines.model_client import ModelRpcClient
from relax_core.registry.catalogue import Catalogue
from relax_core.rpc.isolated_host import DONE, IsolatedHost


class RewardResult(NamedTuple):
    """A score, or a failure with its place."""

    value: float = math.nan
    parts: Mapping[str, float] = {}
    steps: tuple[float, ...] = ()
    outcome: Outcome = Outcome.FINISHED
    error: str = ""
    kind: str = ""
    """Exception type of a failure; equal kinds at equal places are alike."""
    place: str = ""
    """`file:line` in the author's code."""
    frames: str = ""

    @property
    def failed(self) -> bool:
        return not self.outcome.judged

    def packed(self) -> float | list[Any]:
        """Plain data for the wire."""
        if not self.failed and not self.parts and not self.steps:
            return self.value
        return [self.value, dict(self.parts), list(self.steps), self.outcome.value, *self[4:]]


def unpack(packed: float | tuple[Any, ...]) -> RewardResult:
    """Restore what `packed` gave."""
    if isinstance(packed, float):
        return RewardResult(packed)
    value, parts, steps, outcome, *rest = packed
    return RewardResult(value, parts, steps, Outcome(outcome), *rest)


def score_result(result: object, place: str) -> RewardResult:
    """Check what an author returned: a finite number or a `Score` of such; anything else is REWARD_INVALID."""
    score = result if isinstance(result, Score) else Score(result)  # type: ignore[arg-type]
    try:
        value = _finite(score.value)
        parts = {str(name): _finite(part) for name, part in score.parts.items()}
        return RewardResult(value, parts, tuple(_finite(step) for step in score.steps))
    except (TypeError, ValueError) as error:
        kind = type(result).__name__
        message = f"returned {str(result)[:200]!s} ({kind}): {error}; return a finite number or a Score"
        return RewardResult(outcome=Outcome.REWARD_INVALID, error=message, kind=f"invalid {kind}", place=place)


ENGINE_OUTCOMES = (Outcome.ENGINE_ERROR, Outcome.ENGINE_TIMEOUT)
"""Outcomes of a reward that asked an engine: nothing that its author could mend."""


def error_result(error: BaseException, author: Callable[..., Any]) -> RewardResult:
    """Describe an exception: REWARD_ERROR with the frames inside the author's code, the innermost as its place; an engine that
    could not be asked is an outcome of its own."""
    if isinstance(error, InfrastructureError):
        outcome = Outcome.ENGINE_TIMEOUT if isinstance(error, DeadlineExceeded) else Outcome.ENGINE_ERROR
        return RewardResult(outcome=outcome, error=str(error), kind=type(error).__name__, place=where(author))
    trace = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(_OURS)]
    root = _root(author)
    own = [frame for frame in trace if frame.filename.startswith(root)] or trace[-1:]
    trace = trace[trace.index(own[0]) :] if own else []
    place = f"{own[-1].filename}:{own[-1].lineno}" if own else where(author)
    frames = "".join([*traceback.format_list(trace), *traceback.format_exception_only(error)])
    kind = "MemoryError" if isinstance(error, MemoryError) else type(error).__name__
    return RewardResult(
        outcome=Outcome.REWARD_ERROR, error=f"{kind}: {error} ({place})", kind=kind, place=place, frames=frames
    )


def timeout_result(timeout_s: float, place: str) -> RewardResult:
    message = f"did not answer within timeout_s = {timeout_s:g} ({place})"
    return RewardResult(outcome=Outcome.REWARD_TIMEOUT, error=message, kind="timeout", place=place)


def crash_result(error: BaseException, place: str) -> RewardResult:
    message = f"its process ended twice on this sample ({place}): {error}"
    return RewardResult(outcome=Outcome.REWARD_ERROR, error=message, kind="process ended", place=place)


def where(author: Callable[..., Any]) -> str:
    """The `file:line` of a function or method."""
    code = getattr(inspect.unwrap(author), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else repr(author)


_OURS = tuple(str(Path(__file__).parents[1] / room) + "/" for room in ("rewards", "rpc"))
"""Folders whose frames stand between the thread and the author's code."""


def _root(author: Callable[..., Any]) -> str:
    """The prefix of the author's files: the top-level package of the function, or its one file."""
    function = inspect.unwrap(author)
    code = getattr(function, "__code__", None)
    file = code.co_filename if code is not None else ""
    depth = str(getattr(function, "__module__", "")).count(".")
    if not depth:
        return file
    return str(Path(file).parents[min(depth, len(Path(file).parents)) - 1])


def _finite(value: object) -> float:
    if not isinstance(value, Real) and getattr(value, "ndim", None) == 0:
        value = value.item()  # type: ignore[attr-defined]  # a tensor or array of one number
    if not isinstance(value, Real):
        raise TypeError(f"{type(value).__name__} is not a number")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError("not finite")
    return number


def flatten(trajectory: Trajectory) -> list[Any]:
    """Turn everything in a trajectory into plain lists."""
    return [
        [_flat_message(message) for message in trajectory.messages],
        trajectory.response,
        [
            [n.parent, list(n.tokens), n.sampled, list(n.log_probs), list(n.versions), n.turn, list(n.media)]
            for n in trajectory.forest
        ],
        trajectory.outcome.value,
        list(trajectory.step_rewards),
        dict(trajectory.info),
        list(trajectory.step_turns),
        list(trajectory.states),
    ]


def revive(flat: tuple[Any, ...]) -> Trajectory:
    """Restore a flattened trajectory; sequences came back from the wire as tuples."""
    messages, response, forest, outcome, step_rewards, info, step_turns, states = flat
    return Trajectory(
        tuple(message if isinstance(message, Message) else Message(*message) for message in messages),
        response,
        tuple(Node(*node) for node in forest),
        Outcome(outcome),
        step_rewards,
        info,
        step_turns=step_turns,
        states=states,
    )


def _flat_message(message: Message) -> Any:
    if isinstance(message.content, str) and not message.tool_calls and not message.name:
        return [message.role, message.content]
    return message


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
