# SPDX-License-Identifier: Apache-2.0
"""What runs in a reward's killable process: the author's reward, fed unit by unit.

A unit is what the author judges at once: a sample, a group, a batch. Synchronous rewards run in one thread, awaitables
side by side on the loop. Results leave as they come; a unit past its deadline is named, and the process is the
parent's to kill. What holds the interpreter lock can't be named from in here: the parent sees silence.

Rewards passed from Python: `relax.train(..., rewards=[fn])`. A function gets a name in the catalogue of every process
that reads the configuration; only the reward's own child process ever loads and calls it.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn, TypeAlias

from relax_core.api.clock import Clock, SystemClock
from relax_core.api.errors import ConfigError, PluginError
from relax_core.api.reward import BatchReward, GroupReward, Reward
from relax_core.api.task import Task
from relax_core.api.trainer import Chosen
from relax_core.api.trajectory import Trajectory
from relax_core.engines.model_rpc_client import Ask, ModelRpcConnection, own_time
from relax_core.registry.catalogue import Catalogue
from relax_core.rewards.result import RewardResult, raised_verdict, revive, timeout_verdict, verdict_of, where

FLUSH_S = 0.02
"""How long a finished result may wait for company."""
BEAT_S = 0.5
"""How often a process whose samples wait for an engine says so."""
FUNCTION = "reward-function"
"""Component kind of a function passed from Python; its options hold the cloudpickle, read from the parent's pipe."""

Sample: TypeAlias = tuple[Task, Trajectory]
Item: TypeAlias = tuple[list[Any], bool]
"""Results (unit, packed verdicts), and whether the process must be replaced."""


class FunctionReward(Reward):
    """A plain `fn(task, trajectory)` as a reward."""

    def __init__(self, function: Callable[[Task, Trajectory], Any]) -> None:
        super().__init__()
        self.score = function  # type: ignore[method-assign, assignment]

    def score(self, task: Task, trajectory: Trajectory) -> Any:
        raise NotImplementedError


class RewardHost:
    """Holds one reward; the worker's host sets `component` and `build` before the first call."""

    component: Chosen
    build: Callable[[Chosen], Any]

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reward")
        self._author: Callable[..., Any] = self.open
        self._form = ""
        self._line = ModelRpcConnection()

    def open(self) -> tuple[str, str, bool, tuple[str, ...]]:
        """Build the reward; its form (sample, batch or group), the place of its method, whether it awaits others, and the
        engine pools that it asks."""
        reward = self._built()
        needs = tuple(reward.needs_engines)
        if isinstance(reward, GroupReward):
            self._form, self._author = "group", reward.score_group
        elif isinstance(reward, BatchReward):
            self._form, self._author = "batch", reward.score_batch
        else:
            self._form, self._author = "sample", reward.score
        awaits = inspect.iscoroutinefunction(self._author)
        if needs:
            if not awaits:
                fix = "it asks an engine pool, which takes time: write it as `async def`"
                raise PluginError(f"reward {self.component.name}", f"{where(self._author)} is no coroutine; {fix}")
            reward.engines = self._line.hands(needs)
        return self._form, where(self._author), awaits, needs

    async def asks(self) -> AsyncIterator[list[Ask]]:
        """What the reward asks of engine pools, as long as this process lives."""
        async for asks in self._line.asks():
            yield asks

    async def answered(self, number: int, failure: str, value: Any) -> None:
        """What became of one of them."""
        self._line.answered(number, failure, value)

    async def score(
        self,
        tasks: Sequence[Task],
        samples: Sequence[tuple[int, Any]],
        units: Sequence[Sequence[int]],
        timeout_s: float,
        careful: bool,
    ) -> AsyncIterator[Item]:
        """Judge units of sample positions. Careful: one unit at a time, each told before the next begins."""
        revived = [(tasks[task], revive(flat)) for task, flat in samples]
        work = [(number, [revived[position] for position in unit]) for number, unit in enumerate(units)]
        run = self._side_by_side if inspect.iscoroutinefunction(self._author) else self._in_thread
        for part in ([unit] for unit in work) if careful else [work]:
            async for item in run(part, timeout_s):
                yield item
                if item[1]:
                    return

    def _built(self) -> Any:
        if self.component.kind != FUNCTION:
            return self.build(self.component)
        import cloudpickle

        return FunctionReward(cloudpickle.loads(self.component.options["function"]))

    async def _in_thread(self, work: list[tuple[int, list[Sample]]], timeout_s: float) -> AsyncIterator[Item]:
        batch = _Batch(self._judge, work, self._clock, asyncio.get_running_loop())
        future = asyncio.get_running_loop().run_in_executor(self._thread, batch.run)
        while not future.done():
            await asyncio.wait({future}, timeout=FLUSH_S)
            late = batch.overdue(timeout_s) if not future.done() else None
            results, poisoned = batch.take()
            if late is not None:
                number, samples = late
                yield (
                    [*results, [number, [timeout_verdict(timeout_s, where(self._author)).packed()] * len(samples)]],
                    True,
                )
                return
            if results:
                yield results, poisoned
        await future

    async def _side_by_side(self, work: list[tuple[int, list[Sample]]], timeout_s: float) -> AsyncIterator[Item]:
        tasks = {asyncio.create_task(self._awaited(number, samples, timeout_s)) for number, samples in work}
        try:
            while tasks:
                done, tasks = await asyncio.wait(tasks, timeout=BEAT_S, return_when=asyncio.FIRST_COMPLETED)
                if done or self._line.waits:  # who waits for an engine is not silent
                    yield [task.result() for task in done], False
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _awaited(self, number: int, samples: list[Sample], timeout_s: float) -> list[Any]:
        deadline = asyncio.timeout(timeout_s)
        try:
            async with deadline:
                with own_time(deadline):
                    result = await self._ask(samples)
            verdicts = self._verdicts(result, len(samples))
        except Exception as error:
            late = deadline.expired()
            failure = timeout_verdict(timeout_s, where(self._author)) if late else raised_verdict(error, self._author)
            verdicts = [failure] * len(samples)
        return [number, [verdict.packed() for verdict in verdicts]]

    def _judge(self, samples: list[Sample], loop: asyncio.AbstractEventLoop) -> list[RewardResult]:
        try:
            result = self._ask(samples)
            if inspect.isawaitable(result):
                result = asyncio.run_coroutine_threadsafe(_await(result), loop).result()
            return self._verdicts(result, len(samples))
        except (Exception, SystemExit) as error:
            return [raised_verdict(error, self._author)] * len(samples)

    def _ask(self, samples: list[Sample]) -> Any:
        if self._form == "sample":
            return self._author(*samples[0])
        trajectories = [trajectory for _, trajectory in samples]
        if self._form == "group":
            return self._author(samples[0][0], trajectories)
        return self._author([task for task, _ in samples], trajectories)

    def _verdicts(self, result: Any, count: int) -> list[RewardResult]:
        results = [result] if self._form == "sample" else list(result)
        if len(results) != count:
            raise ValueError(f"returned {len(results)} scores for {count} samples; return one each, in order")
        return [verdict_of(one, where(self._author)) for one in results]


class _Batch:
    """Units on their way through the thread: what is done, and what runs since when."""

    def __init__(
        self,
        judge: Callable[[list[Sample], asyncio.AbstractEventLoop], list[RewardResult]],
        work: list[tuple[int, list[Sample]]],
        clock: Clock,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._judge, self._work, self._clock, self._loop = judge, work, clock, loop
        self._done: list[tuple[list[Any], bool]] = []
        self._running: tuple[tuple[int, list[Sample]], float] | None = None

    def run(self) -> None:
        """In the thread. Stops at a MemoryError: a process at its limit is not to be trusted with the next unit."""
        for unit in self._work:
            self._running = unit, self._clock.now()
            verdicts = self._judge(unit[1], self._loop)
            self._running = None
            poisoned = any(verdict.kind == "MemoryError" for verdict in verdicts)
            self._done.append(([unit[0], [verdict.packed() for verdict in verdicts]], poisoned))
            if poisoned:
                return

    def take(self) -> Item:
        taken = self._done[:]
        del self._done[: len(taken)]
        return [result for result, _ in taken], any(poisoned for _, poisoned in taken)

    def overdue(self, timeout_s: float) -> tuple[int, list[Sample]] | None:
        running = self._running
        return running[0] if running is not None and self._clock.now() - running[1] > timeout_s else None


async def _await(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


class PassedFunction(Reward):
    """Stands for a function where its name must be known."""

    def score(self, task: Task, trajectory: Trajectory) -> NoReturn:
        raise NotImplementedError("a reward passed from Python is called in its own process only")


def pack(functions: Iterable[Callable[..., Any]]) -> dict[str, bytes]:
    """Functions by name, as they travel over their parent's own pipe. Raises ConfigError for two of one name."""
    import cloudpickle

    packed: dict[str, bytes] = {}
    for function in functions:
        name = function.__name__.replace("_", "-").strip("-<>") or "function"
        if name in packed:
            raise ConfigError("rewards", f"two functions named {name!r}", "give each its own name")
        packed[name] = cloudpickle.dumps(function)
    return packed


def announce(names: Iterable[str], catalogue: Catalogue) -> None:
    """Let a configuration name them."""
    for name in names:
        catalogue.add("reward", name, type(PassedFunction.__name__, (PassedFunction,), {}))
