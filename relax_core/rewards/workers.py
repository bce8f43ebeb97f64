# SPDX-License-Identifier: Apache-2.0
"""One reward's processes: what waits is taken in batches, whoever breaks its process is found and named, the rest is judged.

A process that spins or dies is killed with its children and replaced; the units it had not answered run again, one at
a time, until the culprit shows. A process killed from outside costs a retry and nothing else. Batches of a reward that
awaits others (a judge model, a sandbox) are under way side by side.

One process of a reward and who uses it: batches side by side where the reward awaits others, else one after another.

A batch that broke the process goes through it again alone, so that the culprit shows.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from relax_core.api.errors import DeadlineExceeded, InfrastructureError, RelaxError, WorkerDied
from relax_core.api.task import Task
from relax_core.api.trainer import Chosen
from relax_core.api.trajectory import Trajectory
from relax_core.api.worker import Worker, Workers, WorkerSpec
from relax_core.engines.model_rpc_server import ModelRpcServer
from relax_core.rewards.circuit_breaker import CircuitBreaker, CircuitOpen, failing_sample, fault_of
from relax_core.rewards.host import FUNCTION
from relax_core.rewards.result import ENGINE_OUTCOMES, RewardResult, death_verdict, flatten, timeout_verdict, unpack

SIDE_BY_SIDE = 64
"""Batches at once in the process of an awaitable reward: a slow answer keeps only its own batch waiting."""

Opening = Callable[[str], Awaitable[tuple[Worker, bool]]]
"""From a process's name to the process with the reward built in it, and whether it awaits others."""


class RewardProcess:
    """`worker` is replaced by whoever finds it broken first."""

    def __init__(self, name: str, opening: Opening) -> None:
        self.name = name
        self.replaced = 0
        self._opening = opening
        self._worker: Worker | None = None
        self._width = 1
        self._places = asyncio.Semaphore(1)
        self._alone = asyncio.Lock()
        self._replacing = asyncio.Lock()

    async def start(self) -> None:
        self._worker, awaits = await self._opening(self.name)
        self._width = SIDE_BY_SIDE if awaits else 1
        self._places = asyncio.Semaphore(self._width)

    @property
    def worker(self) -> Worker:
        if self._worker is None:
            raise WorkerDied(f"{self.name} has no process")
        return self._worker

    async def enter(self) -> bool:
        """Take one place; whether that is the only one. Give it back with `leave`."""
        await self._places.acquire()
        return self._width == 1

    def leave(self) -> None:
        self._places.release()

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """Every place: who is in there leaves first, nobody enters."""
        taken = 0
        async with self._alone:
            try:
                for _ in range(self._width):
                    await self._places.acquire()
                    taken += 1
                yield
            finally:
                for _ in range(taken):
                    self._places.release()

    async def replace(self, seen: int) -> None:
        """A new process, unless somebody has replaced the one of `replaced == seen` already."""
        async with self._replacing:
            if self.replaced != seen:
                return
            await self.kill()
            self.replaced += 1
            self._worker, _ = await self._opening(f"{self.name}.{self.replaced}")

    async def kill(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            await worker.kill()


START_S = 120.0
GRACE_S = 2.0
"""On top of a reward's own deadline before its process's silence counts: the way there and back."""
MAX_UNITS = 1024
NO_DESK = ModelRpcServer({})
"""Of a reward that is asked outside a run: no engine pool is there."""
Group = tuple[Task, Sequence[Trajectory]]


@dataclass(frozen=True, slots=True)
class RewardSettings:
    """One `[[rewards]]` table."""

    chosen: Chosen
    weight: float = 1.0
    timeout_s: float = 10.0
    memory_mb: int = 0
    """Address-space limit of its process; 0: none."""
    only: str = ""
    """`domain=maths`: the tasks it applies to, by a dotted path into the metadata; empty: all."""
    function: bytes | None = None
    """cloudpickle of a `fn(task, trajectory) -> float` passed from Python."""


@dataclass(slots=True, eq=False)
class _Job:
    """One call's samples; its caller awaits `done`."""

    samples: list[tuple[Task, Trajectory]]
    verdicts: list[RewardResult | None]
    done: asyncio.Future[None]
    missing: int

    def settle(self, position: int, verdict: RewardResult) -> None:
        self.verdicts[position] = verdict
        self.missing -= 1
        if not self.missing and not self.done.done():
            self.done.set_result(None)


@dataclass(slots=True, eq=False)
class _Unit:
    """What the author judges at once: positions in one job."""

    job: _Job
    members: list[int]
    deaths: int = 0
    """Of processes that had nothing else to do."""

    def halves(self) -> list[_Unit]:
        middle = len(self.members) // 2
        return [_Unit(self.job, self.members[:middle]), _Unit(self.job, self.members[middle:])]


class RewardWorkers:
    """Scores with one reward in `num_workers` processes."""

    def __init__(
        self, choice: RewardSettings, name: str, children: Workers, num_workers: int, desk: ModelRpcServer = NO_DESK
    ) -> None:
        self.choice, self.name, self._desk = choice, name, desk
        self._children = children
        self._lanes = [RewardProcess(f"reward-{name}-{number}", self._opened) for number in range(num_workers)]
        self._waiting: asyncio.Queue[_Unit] = asyncio.Queue()
        self._loops: list[asyncio.Task[None]] = []
        self._open: set[_Job] = set()
        self._broken: Exception | None = None
        self._fuse = CircuitBreaker()
        self._form = self._place = ""

    async def start(self) -> None:
        """All processes up and the reward built in each; an error of the author's constructor comes out here."""
        await asyncio.gather(*(lane.start() for lane in self._lanes))
        self._loops = [asyncio.create_task(self._serve(lane)) for lane in self._lanes]

    async def score(self, groups: Sequence[Group]) -> list[list[RewardResult]]:
        """A verdict for each trajectory. Raises FuseTripped, or what makes the reward's processes unusable."""
        if self._broken is not None:
            raise self._broken
        samples = [(task, trajectory) for task, trajectories in groups for trajectory in trajectories]
        if not samples:
            return [[] for _ in groups]
        job = _Job(samples, [None] * len(samples), asyncio.get_running_loop().create_future(), len(samples))
        self._open.add(job)
        try:
            for unit in self._units(job, groups):
                self._waiting.put_nowait(unit)
            await job.done
        finally:
            self._open.discard(job)
        verdicts = (verdict for verdict in job.verdicts if verdict is not None)
        return [[next(verdicts) for _ in trajectories] for _, trajectories in groups]

    @property
    def owed(self) -> int:
        """Samples without a verdict."""
        return sum(job.missing for job in self._open)

    async def stop(self) -> None:
        self._break(RelaxError(f"reward {self.name} was stopped"))
        for loop in self._loops:
            loop.cancel()
        await asyncio.gather(*self._loops, return_exceptions=True)
        await asyncio.gather(*(lane.kill() for lane in self._lanes))

    def _units(self, job: _Job, groups: Sequence[Group]) -> list[_Unit]:
        positions = list(range(len(job.samples)))
        if self._form == "batch":
            return [_Unit(job, positions)]
        if self._form == "sample":
            return [_Unit(job, [position]) for position in positions]
        following = iter(positions)
        members = ([next(following) for _ in trajectories] for _, trajectories in groups)
        return [_Unit(job, own) for own in members if own]

    async def _opened(self, name: str) -> tuple[Worker, bool]:
        spec = WorkerSpec(
            name,
            self._component(),
            target="relax_core.rewards.host:RewardHost",
            memory_mb=self.choice.memory_mb,
        )
        (worker,) = await self._children.start([spec], START_S)
        self._form, self._place, awaits, needs = await worker.call("open", timeout_s=START_S)
        self._desk.attend(worker, f"reward {self.name}", needs)
        return worker, awaits

    def _component(self) -> Chosen:
        if self.choice.function is None:
            return self.choice.chosen
        return Chosen(FUNCTION, self.name, {"function": self.choice.function})

    async def _serve(self, lane: RewardProcess) -> None:
        """What waits is shared out among the lanes."""
        async with asyncio.TaskGroup() as batches:
            while self._broken is None:
                pending = [await self._waiting.get()]
                only = await lane.enter()
                share = min(MAX_UNITS, -(-self._waiting.qsize() // len(self._lanes)))
                pending += [self._waiting.get_nowait() for _ in range(share)]
                batches.create_task(self._batch(lane, pending, only))

    async def _batch(self, lane: RewardProcess, pending: list[_Unit], only: bool) -> None:
        """All of it answered; what the first way through the process leaves goes again without company."""
        try:
            try:
                pending, careful = await self._round(lane, pending, alone=only and len(pending) == 1)
            finally:
                lane.leave()
            if pending:
                async with lane.alone():
                    while pending:
                        pending, broke = await self._round(lane, pending, alone=careful or len(pending) == 1)
                        careful = careful or broke
        except Exception as error:
            self._break(error)

    def _break(self, error: Exception) -> None:
        """Nobody waits for a reward that can't go on: its callers get the reason."""
        self._broken = error
        for job in self._open:
            if not job.done.done():
                job.done.set_exception(error)

    async def _round(self, lane: RewardProcess, pending: list[_Unit], alone: bool) -> tuple[list[_Unit], bool]:
        """One stream through the lane's process; what is left to do, and whether the process broke."""
        answered: set[int] = set()
        again: list[_Unit] = []
        seen = lane.replaced
        try:
            if await self._stream(lane, pending, alone, answered, again):
                await lane.replace(seen)
            return again + _rest(pending, answered), False
        except (DeadlineExceeded, WorkerDied) as error:
            await lane.replace(seen)
            rest = _rest(pending, answered)
            if alone and rest:
                rest = self._blame(rest, error)
            return again + rest, True

    async def _stream(
        self, lane: RewardProcess, pending: list[_Unit], alone: bool, answered: set[int], again: list[_Unit]
    ) -> bool:
        arguments = (*_payload(pending), self.choice.timeout_s, alone)
        stream: Any = lane.worker.stream("score", *arguments, timeout_s=self.choice.timeout_s + GRACE_S)
        async with aclosing(stream) as items:
            async for results, poisoned in items:
                for number, packed in results:
                    answered.add(number)
                    again += self._settle(pending[number], [unpack(one) for one in packed])
                if poisoned:
                    return True
        return False

    def _blame(self, rest: list[_Unit], error: Exception) -> list[_Unit]:
        """Alone in its process, the first unanswered unit broke it; a death may come from outside, so it gets a second try."""
        culprit = rest[0]
        if isinstance(error, DeadlineExceeded):
            verdict = timeout_verdict(self.choice.timeout_s, self._place)
        else:
            culprit.deaths += 1
            if culprit.deaths < 2:
                return rest
            verdict = death_verdict(error, self._place)
        return self._settle(culprit, [verdict] * len(culprit.members)) + rest[1:]

    def _settle(self, unit: _Unit, verdicts: Sequence[RewardResult]) -> list[_Unit]:
        """Record verdicts; a failed batch is halved instead, so that only who spoiled it fails."""
        if self._form == "batch" and len(unit.members) > 1 and any(map(_spoils, verdicts)):
            return unit.halves()
        for position, verdict in zip(unit.members, verdicts, strict=True):
            self._watch(unit.job.samples[position], verdict)
            unit.job.settle(position, verdict)
        return []

    def _watch(self, sample: tuple[Task, Trajectory], verdict: RewardResult) -> None:
        seen = self._fuse.record(fault_of(verdict))
        if seen and verdict.outcome in ENGINE_OUTCOMES:
            raise InfrastructureError(f"reward {self.name} got no answer on {seen}: {verdict.error}")
        if seen:
            raise CircuitOpen(self.name, verdict, seen, failing_sample(self.name, *sample, verdict))


def _spoils(verdict: RewardResult) -> bool:
    """Whether one sample may have failed a whole batch; an engine that could not be asked fails its halves too."""
    return verdict.failed and verdict.kind[:7] != "invalid" and verdict.outcome not in ENGINE_OUTCOMES


def _rest(pending: list[_Unit], answered: set[int]) -> list[_Unit]:
    return [unit for number, unit in enumerate(pending) if number not in answered]


def _payload(units: Sequence[_Unit]) -> tuple[list[Task], list[list[Any]], list[list[int]]]:
    """Each task once, each sample flat, units as positions in them."""
    tasks: dict[int, tuple[int, Task]] = {}
    samples: list[list[Any]] = []
    members: list[list[int]] = []
    for unit in units:
        start = len(samples)
        for position in unit.members:
            task, trajectory = unit.job.samples[position]
            number, _ = tasks.setdefault(id(task), (len(tasks), task))
            samples.append([number, flatten(trajectory)])
        members.append(list(range(start, len(samples))))
    return [task for _, task in tasks.values()], samples, members
