# SPDX-License-Identifier: Apache-2.0
"""The host of a reward in its killable process, the results of rewards, and rewards passed as Python functions.

The host scores units; a unit is a sample, a group or a batch. A result is a finite score, or the failure with its place
in the author's code. A function (`relax.train(..., rewards=[fn])`) has a name in the catalogue of every process that
reads the configuration; only the reward's own process loads and calls it.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import traceback
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeAlias

from relax_core.api.errors import ConfigError, DeadlineExceeded, InfrastructureError, PluginError, printable
from relax_core.api.reward import LARGEST_REWARD, BatchReward, Gold, GroupReward, Reward, Score, Unreadable
from relax_core.api.sandbox import SandboxLimits
from relax_core.api.task import Message, Task
from relax_core.api.trajectory import Outcome, Trajectory
from relax_core.engines.model_rpc import ModelRpcClient
from relax_core.registry.catalogue import Catalogue
from relax_core.registry.error_text import message_of
from relax_core.registry.shapes import WrongShape, checked, reward_number, shown
from relax_core.rewards.functions import FunctionReward, reward_of
from relax_core.rpc import messages
from relax_core.rpc.isolated_host import DONE, IsolatedHost
from relax_core.sandboxes.pool import SandboxRpcClient

FUNCTION = "reward-function"
"""Component kind of a function passed from Python; its option `function` holds the cloudpickle of the function."""
Unit: TypeAlias = list[tuple[Task, Trajectory | None]]
"""The samples that one call of a reward scores. A single task without a trajectory asks for its `GoldResult`."""


@messages.register
@dataclass(frozen=True, slots=True)
class RewardFacts:
    """The facts about a reward that its process sends when it starts."""

    form: Literal["sample", "group", "batch"]
    """The samples that one call of the reward scores."""
    place: str
    """`file:line` of the scoring method."""
    needs_engines: tuple[str, ...]
    needs_sandbox: SandboxLimits | None
    reads_golds: bool


@messages.register
@dataclass(frozen=True, slots=True)
class ScoredSample:
    """The score of one sample, by one reward or by all rewards of a run, or the failure to score the sample."""

    value: float = math.nan
    """Score by one reward; of all rewards, the sum of the environment's rewards and the weighted rewards. NaN unless the
    outcome is judged."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Parts of one reward's score by name. Of all rewards: reward -> unweighted value, and `<reward>/<part>` -> value."""
    steps: tuple[float, ...] = ()
    """[turns] credit of single turns, up to the last turn with credit; of all rewards, with the environment's rewards."""
    outcome: Outcome = Outcome.FINISHED
    error: str = ""
    frames: str = ""
    """Traceback frames in the author's code, if a reward raised an error."""
    kind: str = ""
    """Exception type of one reward's failure; failures of the same kind and place count as the same fault."""
    place: str = ""
    """`file:line` of one reward's failure in the author's code."""


@messages.register
@dataclass(frozen=True, slots=True)
class GoldResult:
    """The result of scoring a task's own gold answer: the gold as it was read, or the error of reading it."""

    read: str = ""
    """The value of the gold answer, to show to a person; empty if `error` is set."""
    responses: tuple[str, ...] = ()
    """Responses that state the gold answer; empty: the gold was only read."""
    scores: tuple[float, ...] = ()
    """[responses] score of each response."""
    best: float = 1.0
    error: str = ""

    @property
    def fault(self) -> str:
        """Return the reason why the gold answer does not score `best`; empty if it does."""
        if self.error:
            return self.error
        for response, score in zip(self.responses, self.scores, strict=True):
            if not score >= self.best - TOLERANCE:
                return (
                    f"read as {self.read}, it scores {score:g} instead of {self.best:g} for the response {response!r}"
                )
        return ""


TOLERANCE = 1e-9
"""Rounding of scores that are weighted sums."""


def pack_units(units: Sequence[Unit]) -> object:
    """Pack units to send: each task once, each unit as indices of tasks, all trajectories in order, without routed experts."""
    numbers: dict[int, int] = {}
    tasks: list[Task] = []
    for task in (task for unit in units for task, _ in unit):
        if id(task) not in numbers:
            numbers[id(task)] = len(tasks)
            tasks.append(task)
    trajectories = tuple(
        replace(
            trajectory, forest=tuple(replace(node, routed_experts=b"", routed_valid=b"") for node in trajectory.forest)
        )
        if trajectory is not None and [node for node in trajectory.forest if node.routed_valid]
        else trajectory
        for unit in units
        for _, trajectory in unit
    )
    return tuple(tasks), [[numbers[id(task)] for task, _ in unit] for unit in units], trajectories


class RewardHost(IsolatedHost):
    """The host of one reward; turns the author's exceptions into results, since only this process has their frames."""

    def open(self) -> RewardFacts:
        """Build the reward and return its facts."""
        if self.component.kind == FUNCTION:
            import cloudpickle

            reward: Any = reward_of(cloudpickle.loads(self.component.options["function"]))
        else:
            reward = self.build(self.component)
            reward = reward.adapted() if isinstance(reward, FunctionReward) else reward
        self._score: Callable[..., Any]
        self._close: Callable[[], Any] = reward.close
        self._gold: Callable[[Task], Gold | None] = reward.gold
        self.ends = type(reward).close is not Reward.close
        self._form: Literal["sample", "group", "batch"]
        if isinstance(reward, GroupReward):
            self._form, self._score = "group", reward.score_group
        elif isinstance(reward, BatchReward):
            self._form, self._score = "batch", reward.score_batch
        else:
            self._form, self._score = "sample", reward.score
        self.concurrent = inspect.iscoroutinefunction(self._score)
        needs, limits = tuple(reward.needs_engines), reward.needs_sandbox
        self._runs_programs = limits is not None
        if (needs or limits) and not self.concurrent:
            fix = f"it calls {'an engine pool' if needs else 'a sandbox'}, which takes time: write it as `async def`"
            raise PluginError(f"reward {self.component.name}", f"{where(self._score)} is not a coroutine; {fix}")
        if needs:
            reward.engines = {name: ModelRpcClient(self.parent, name) for name in needs}
        if limits is not None:
            reward.sandbox = SandboxRpcClient(self.parent)
        return RewardFacts(self._form, where(self._score), needs, limits, reads_golds(reward))

    async def end(self) -> None:
        loop = asyncio.get_running_loop()
        released = self._close() if self.concurrent else await loop.run_in_executor(self._thread, self._close)
        if inspect.isawaitable(released):
            await released

    def unpack(self, payload: Any) -> list[Unit]:
        tasks, units, trajectories = payload
        left = iter(trajectories)
        return [[(tasks[number], next(left)) for number in unit] for unit in units]

    def handle(self, item: Unit) -> object:
        task, first = item[0]
        if first is None:
            return self._scored_gold(task)
        if self._form == "sample":
            return self._score(task, first)
        trajectories = [trajectory for _, trajectory in item]
        if self._form == "group":
            return self._score(item[0][0], trajectories)
        return self._score([task for task, _ in item], trajectories)

    def _scored_gold(self, task: Task) -> GoldResult | Awaitable[GoldResult]:
        """Read a task's gold answer, and score the responses that state the answer as samples are scored."""
        gold = self._gold(task)
        if gold is not None and self._runs_programs:  # a check of the data starts no sandbox
            gold = replace(gold, responses=())
        asked = (Message("user", task.prompt),) if isinstance(task.prompt, str) else task.prompt
        items: list[Unit] = [
            [(task, Trajectory((*asked, Message("assistant", response)), response, ()))]
            for response in (gold.responses if gold is not None else ())
        ]
        results = [self.handle(item) for item in items]
        if self.concurrent or any(map(inspect.isawaitable, results)):
            return self._awaited_gold(gold, items, results)
        return self._gold_result(gold, items, results)

    async def _awaited_gold(self, gold: Gold | None, items: Sequence[Unit], results: Sequence[Any]) -> GoldResult:
        found = await asyncio.gather(*results, return_exceptions=True)
        if failed := next((one for one in found if isinstance(one, BaseException)), None):
            raise failed
        return self._gold_result(gold, items, found)

    def _gold_result(self, gold: Gold | None, items: Sequence[Unit], results: Sequence[Any]) -> GoldResult:
        if gold is None:
            return GoldResult()
        scores = []
        for item, scored in zip(items, results, strict=True):
            (result,) = self.pack_result(item, scored)
            if isinstance(result, ScoredSample) and not result.outcome.judged:
                return GoldResult(error=result.error)
            scores.append(result.value if isinstance(result, ScoredSample) else result)
        return GoldResult(gold.read, tuple(gold.responses), tuple(scores), reward_number(gold.best, "Gold.best"))

    def pack_result(self, item: Unit, result: Any) -> list[Any]:
        """Check the author's return value: a finite number or `Score` for each sample; plain numbers stay plain."""
        if isinstance(result, GoldResult):
            return [result]
        if self._form != "sample" and (
            isinstance(result, str | bytes | Mapping | set | frozenset) or not isinstance(result, Iterable)
        ):
            raise TypeError(f"returned {shown(result)} for {len(item)} samples; return a list of one score each")
        results = [result] if self._form == "sample" else list(result)
        if len(results) != len(item):
            raise ValueError(f"returned {len(results)} scores for {len(item)} samples; return one each, in order")
        return list(self._checked(results))

    def pack_error(self, item: Unit, error: BaseException) -> tuple[str, list[Any]]:
        if item[0][1] is None:
            reason = str(error) if isinstance(error, ValueError) else error_result(error, self._gold).error
            return DONE, [GoldResult(error=reason)]
        return DONE, [error_result(error, self._score)] * len(item)

    def _checked(self, results: Sequence[Any]) -> Iterator[float | ScoredSample]:
        for result in results:
            if isinstance(result, Unreadable):
                yield error_result(result, self._score)
                continue
            score = result if isinstance(result, Score) else Score(result)
            try:
                value, parts = reward_number(score.value, "value"), _parts(score.parts)
                steps = tuple(reward_number(step, f"steps[{turn}]") for turn, step in enumerate(score.steps))
                yield ScoredSample(value, parts, steps) if parts or steps else value
            except Exception as error:  # such as an attribute that is missing, or the error of an author's own type
                kind = type(result).__name__
                message = f"returned {shown(result, 200)}: {message_of(error)}; return a finite number or a Score"
                yield ScoredSample(
                    outcome=Outcome.REWARD_INVALID, error=message, kind=f"invalid {kind}", place=where(self._score)
                )


ENGINE_OUTCOMES = (Outcome.ENGINE_ERROR, Outcome.ENGINE_TIMEOUT)
"""Outcomes of a reward whose engine pool or sandbox failed; the reward's author can't fix them."""


def error_result(error: BaseException, author: Callable[..., Any]) -> ScoredSample:
    """Turn an exception into a result, usually REWARD_ERROR with the frames inside the author's code.

    The innermost of these frames is the result's place. A failed engine pool or sandbox gives one of `ENGINE_OUTCOMES`.
    """
    if isinstance(error, InfrastructureError):
        outcome = Outcome.ENGINE_TIMEOUT if isinstance(error, DeadlineExceeded) else Outcome.ENGINE_ERROR
        return ScoredSample(outcome=outcome, error=str(error), kind=type(error).__name__, place=where(author))
    trace = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(_OURS)]
    root = _root(author)
    own = [frame for frame in trace if frame.filename.startswith(root)] or trace[-1:]
    trace = trace[trace.index(own[0]) :] if own else []
    place = f"{own[-1].filename}:{own[-1].lineno}" if own else where(author)
    frames = printable("".join([*traceback.format_list(trace), *traceback.format_exception_only(error)]))
    kind = "MemoryError" if isinstance(error, MemoryError) else type(error).__name__
    message = message_of(error)
    failed = ScoredSample(
        outcome=Outcome.REWARD_ERROR, error=f"{kind}: {message} ({place})", kind=kind, place=place, frames=frames
    )
    if not isinstance(error, Unreadable):
        return failed
    try:
        return replace(failed, outcome=Outcome.REWARD_UNREADABLE, error=message, parts=_parts(error.parts))
    except Exception as wrong:  # of parts that are not numbers
        fault = f"raised Unreadable({message!r:.200}) with {message_of(wrong)} ({place})"
        return replace(failed, outcome=Outcome.REWARD_INVALID, error=fault, kind="invalid parts")


_GOLDS, _SCORES = Sequence[GoldResult], Sequence[float | ScoredSample]


def check_results(unit: Unit, results: Any) -> None:
    """Raise WrongShape unless `results` may be what `RewardHost` sends for a unit: a result for each sample or gold."""
    scored = unit[0][1] is not None
    plain = scored and type(results) is tuple and len(results) == len(unit) == 1 and type(results[0]) is float
    if plain and abs(results[0]) <= LARGEST_REWARD:  # as most results are
        return
    checked(results, _SCORES if scored else _GOLDS, "results")
    if len(results) != len(unit):
        raise WrongShape(f"results: got {len(results)} for {len(unit)} samples")
    for result in results:
        if isinstance(result, ScoredSample):
            for number in (result.value,) * result.outcome.judged + (*result.steps, *result.parts.values()):
                reward_number(number, "results")
        elif not isinstance(result, GoldResult):
            reward_number(result, "results")


def where(author: Callable[..., Any]) -> str:
    """Return the `file:line` of a function or method."""
    code = getattr(inspect.unwrap(author), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else repr(author)


_OURS = tuple(str(Path(__file__).parents[1] / room) + "/" for room in ("rewards", "rpc"))
"""Folders of Relax's own code, left out of tracebacks; its frames precede those of the author's code."""


def _root(author: Callable[..., Any]) -> str:
    """Return the path prefix of the author's files: the top-level package of the function, or its only file."""
    function = inspect.unwrap(author)
    code = getattr(function, "__code__", None)
    file = code.co_filename if code is not None else ""
    depth = str(getattr(function, "__module__", "")).count(".")
    if not depth:
        return file
    return str(Path(file).parents[min(depth, len(Path(file).parents)) - 1])


def reads_golds(reward: Any) -> bool:
    """Return True if a reward, or the class of one, overrides `gold` and calls no engine pool."""
    kind = reward if isinstance(reward, type) else type(reward)
    return getattr(kind, "gold", Reward.gold) is not Reward.gold and not getattr(reward, "needs_engines", ())


def _parts(parts: Mapping[str, Any]) -> dict[str, float]:
    return {printable(str(name)): reward_number(part, f"parts[{name!r:.40}]") for name, part in parts.items()}


class PassedFunction(Reward):
    """A placeholder in the catalogue for a function passed from Python; it can't score."""

    def score(self, task: Task, trajectory: Trajectory) -> NoReturn:
        raise NotImplementedError("a reward passed from Python can be called only in its own process")


def pack(functions: Iterable[Callable[..., Any]]) -> dict[str, bytes]:
    """Pickle functions by name, to travel over their parent's pipe; raise ConfigError if two have the same name."""
    import cloudpickle

    packed: dict[str, bytes] = {}
    for function in functions:
        name = function.__name__.replace("_", "-").strip("-<>") or "function"
        if name in packed:
            raise ConfigError("rewards", f"two functions named {name!r}", "give each its own name")
        packed[name] = cloudpickle.dumps(function)
    return packed


def announce(names: Iterable[str], catalogue: Catalogue) -> None:
    """Add the names of passed functions to the catalogue, so that a configuration can name them."""
    for name in names:
        catalogue.add("reward", name, type(PassedFunction.__name__, (PassedFunction,), {}))
