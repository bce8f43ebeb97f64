# SPDX-License-Identifier: Apache-2.0
"""The real roles on the real bus, over scripted components in virtual time; what happened when is written down.

Only worker processes are replaced: each is an object of this process that may be killed at any moment.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from copy import copy
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from unittest import mock

from relax_core.api.batch import RowBatch
from relax_core.api.bus import Account
from relax_core.api.component import Chosen
from relax_core.api.engine import EngineSpec, GenerateRequest
from relax_core.api.errors import DeadlineExceeded, WorkerDied
from relax_core.api.events import Event, RoleRecovered, StepFinished
from relax_core.api.role import Role, WorkerSpec
from relax_core.api.trainer import Chunk, TrainerSpec
from relax_core.api.weights import Version
from relax_core.bus.service import open_bus
from relax_core.bus.store import InProcessBus
from relax_core.config.compose import compose, parse_config
from relax_core.control.planner import plan
from relax_core.devices.scheduler import DeviceService
from relax_core.registry.catalogue import Catalogue
from relax_core.rpc import messages
from relax_core.rpc.host import Host
from relax_core.runners.context import RoleContext, run_role
from relax_core.runners.launch import Launch, bus_settings
from relax_core.runners.run_status import RunStatusService
from relax_core.tensor_files.mapped_files import sweep
from relax_core.weights.registry import WeightRegistry
from tests.unit.roles.virtual_time import VirtualClock, run_virtual
from tests.unit.sampling.toy_policy import Letters

if TYPE_CHECKING:
    import pytest

E = TypeVar("E", bound=Event)
FOR_EVER_S = 1e9
SAMPLES = 4 * 4
"""Samples of a step, unless a run sets other groups."""
SCRIPTED = Path(__file__).with_name("scripted_components.py")


@dataclass(frozen=True)
class Span:
    """One call of one worker, in virtual seconds."""

    worker: str
    method: str
    start: float
    end: float

    def overlaps(self, other: Span) -> bool:
        return self.start < other.end and other.start < self.end


class SimulatedWorker:
    """A worker of this process: its calls pass the wire format and end when it is killed."""

    def __init__(self, spec: WorkerSpec, host: Host, spans: list[Span]) -> None:
        self.name, self.pid, self.host, self._host, self._spans = spec.name, 0, "127.0.0.1", host, spans
        self._dead, self._hangs = asyncio.Event(), False

    async def free_port(self, address: str) -> int:
        return 1

    async def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        start = asyncio.get_running_loop().time()
        given = messages.decode(messages.encode(args))
        try:
            return messages.decode(
                messages.encode(await self._alive(self._host.call(method, given), method, timeout_s))
            )
        finally:
            self._spans.append(Span(self.name, method, start, asyncio.get_running_loop().time()))

    async def stream(self, method: str, *args: Any, timeout_s: float) -> AsyncIterator[Any]:
        start = asyncio.get_running_loop().time()
        async with aclosing(self._host.stream(method, messages.decode(messages.encode(args)))) as items:
            try:
                while True:
                    yield messages.decode(messages.encode(await self._alive(anext(items), method, timeout_s)))
            except StopAsyncIteration:
                return
            finally:
                self._spans.append(Span(self.name, method, start, asyncio.get_running_loop().time()))

    async def _alive(self, work: Any, method: str, timeout_s: float) -> Any:
        task, dead = asyncio.ensure_future(self._answer(work)), asyncio.ensure_future(self._dead.wait())
        try:
            await asyncio.wait({task, dead}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if self._dead.is_set():
                raise WorkerDied(f"worker {self.name} was killed during {method}")
            if not task.done():
                raise DeadlineExceeded(self.name, method, timeout_s)
            found = task.result()
            if found is _OVER:
                raise StopAsyncIteration
            return found
        finally:
            for one in (task, dead):
                one.cancel()
            await asyncio.gather(task, dead, return_exceptions=True)

    async def _answer(self, work: Any) -> Any:
        if self._hangs:
            with contextlib.suppress(AttributeError):
                work.close()  # nobody will do it
            await asyncio.sleep(FOR_EVER_S)
        answer = await _awaited(work)
        if self._hangs:
            await asyncio.sleep(FOR_EVER_S)
        return answer

    def hang(self) -> None:
        """It lives and says nothing any more."""
        self._hangs = True

    async def stop(self, timeout_s: float = 5.0) -> None:
        await self.kill()

    async def kill(self) -> None:
        self._dead.set()

    @property
    def dead(self) -> bool:
        return self._dead.is_set()


_OVER = object()


async def _awaited(work: Any) -> Any:
    try:
        return await work
    except StopAsyncIteration:
        return _OVER


class SimulatedWorkers:
    """`api.Workers` of this process; `of_role` makes those of one role."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue, self.spans = catalogue, list[Span]()
        self.alive: dict[str, SimulatedWorker] = {}
        self._own: list[SimulatedWorker] = []

    def of_role(self) -> SimulatedWorkers:
        made = copy(self)
        made._own = []
        return made

    async def start(self, specs: Sequence[WorkerSpec], timeout_s: float = 120.0) -> tuple[SimulatedWorker, ...]:
        hosts = [Host.make(spec.component, spec.target, self._catalogue) for spec in specs]
        made = tuple(SimulatedWorker(spec, host, self.spans) for spec, host in zip(specs, hosts, strict=True))
        self.alive |= {worker.name: worker for worker in made}
        self._own += made
        return made

    async def close(self) -> None:
        for worker in self._own:
            await worker.kill()


@dataclass
class RunOutcome:
    """The outcome of a run."""

    steps: list[StepFinished]
    events: list[Event]
    spans: list[Span]
    account: Account
    seconds: float
    errors: dict[str, BaseException] = field(default_factory=dict)

    def of(self, worker: str, method: str) -> list[Span]:
        return [span for span in self.spans if span.worker.startswith(worker) and span.method == method]

    def told(self, kind: type[E]) -> list[E]:
        """Return the events of one kind in their order."""
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def recovered(self) -> list[str]:
        """Roles that worked again after a failure, in order."""
        return [event.role for event in self.told(RoleRecovered)]

    def metric(self, name: str) -> list[float]:
        return [step.metrics.get(name, 0.0) for step in self.steps]

    def assert_whole(self, steps: int, staleness: int, *, drops: bool = False) -> None:
        """Require each step once, lags within the bound and a balanced ledger; all samples are trained, unless it `drops`."""
        assert [step.step for step in self.steps] == list(range(1, steps + 1))
        assert all(0 <= lag <= staleness for lag in self.metric("lag/max"))
        for step in self.steps:
            row = step.metrics
            assert row["samples/balanced"] == 1
            assert row["samples/issued"] == row["samples/trained"] + row["samples/dropped"] + row["samples/in_flight"]
        assert self.account.balanced, self.account.problem
        assert drops or self.account.trained == steps * SAMPLES


@dataclass
class Asked:
    """The specs, requests and rows that workers were given."""

    requests: list[GenerateRequest] = field(default_factory=list)
    engines: dict[str, EngineSpec] = field(default_factory=dict)
    """By the name of the engine."""
    trainers: dict[str, TrainerSpec] = field(default_factory=dict)
    """By role."""
    rows: list[RowBatch] = field(default_factory=list)
    """Rows of each `accumulate`."""
    families: list[Mapping[str, Any]] = field(default_factory=list)
    """The `[model]` table that each model family was opened with."""


def record_calls(patch: pytest.MonkeyPatch) -> Asked:
    """Record what simulated workers and model families are given until the patch is undone."""
    asked = Asked()
    call, stream = SimulatedWorker.call, SimulatedWorker.stream

    async def calling(self: SimulatedWorker, method: str, *args: Any, timeout_s: float) -> Any:
        for given in args:
            if isinstance(given, TrainerSpec):
                asked.trainers[given.role] = given
            elif isinstance(given, EngineSpec):
                asked.engines[given.name] = given
            elif isinstance(given, Chunk) and method == "accumulate":
                asked.rows.append(given.rows)
        return await call(self, method, *args, timeout_s=timeout_s)

    def streaming(self: SimulatedWorker, method: str, *args: Any, timeout_s: float) -> AsyncIterator[Any]:
        if method == "generate":
            asked.requests.extend(args[0])
        return stream(self, method, *args, timeout_s=timeout_s)

    def opening(self: Letters, model: Mapping[str, Any]) -> None:
        asked.families.append(model)

    patch.setattr(Letters, "open", opening)
    patch.setattr(SimulatedWorker, "call", calling)
    patch.setattr(SimulatedWorker, "stream", streaming)
    return asked


class RecordingRunStatus(RunStatusService):
    """A run status that forgets no event."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(clock)
        self.heard: list[Event] = []
        self.heard_more = asyncio.Event()

    async def emit(self, event: Event) -> None:
        await super().emit(event)
        self.heard.append(event)
        self.heard_more.set()


@cache
def catalogue(*files: str) -> Catalogue:
    """Load the catalogue of these single-file plugins, once for all runs of this process."""
    return Catalogue.load(files)


Happening = Callable[["SimulatedRun"], Coroutine[Any, Any, None]]


class SimulatedRun:
    """One run of the roles that the plan names."""

    def __init__(self, folder: Path, more: Sequence[str] = (), **settings: Any) -> None:
        """`more`: single-file plugins beside the scripted components."""
        folder.mkdir(parents=True, exist_ok=True)
        tasks = folder / "tasks.jsonl"
        tasks.write_text("".join(json.dumps({"prompt": f"p{number}"}) + "\n" for number in range(16)))
        plugins = (str(SCRIPTED), *more)
        self.catalogue = catalogue(*plugins)
        layers = [_settings(folder, tasks), {"plugins": list(plugins)}, settings]
        self.config = compose(layers, (), self.catalogue, on_disk=False).config
        run_id = f"simulated-{os.getpid()}"  # other processes of the suite have folders in shared memory too
        self.launch = Launch(run_id, str(folder), self.config.dump(), plan(self.config, self.catalogue), plugins)
        self.clock = VirtualClock()
        self.bus_settings = bus_settings(self.launch)
        self.left_in_memory: list[str] = []
        """Roles of the copies that were there when all roles had ended."""
        self.plugin_roles: dict[str, Role] = {}
        """Roles that take the place of the core's of their name."""

    def run(self, *happenings: Happening, at_most_s: float = 1e5) -> RunOutcome:
        """All roles to their end while the happenings take place; raises what a role raised."""
        return run_virtual(self._perform(happenings), at_most_s)

    async def _perform(self, happenings: Sequence[Happening]) -> RunOutcome:
        launch, clock = self.launch, self.clock
        self.bus = await open_bus(InProcessBus(), self.bus_settings, launch.run_dir, Version("actor", 0, 0), clock)
        self.run_status, weights, self.workers = (
            RecordingRunStatus(clock),
            WeightRegistry(clock),
            SimulatedWorkers(self.catalogue),
        )
        self.devices = DeviceService(clock)

        def context(role: str) -> Callable[[int], RoleContext]:
            def make(registration: int) -> RoleContext:
                workers = self.workers.of_role()
                return RoleContext(
                    role, launch, self.catalogue, self.bus, weights, self.run_status, workers, workers, clock, registration,
                    self.devices,
                )  # fmt: skip

            return make

        built = {name: self.catalogue.build(Chosen("role", name), Role) for name in launch.plan.roles}
        roles = list((built | self.plugin_roles).values())
        self.roles = {role.name: role for role in roles}
        around = [asyncio.create_task(happening(self)) for happening in happenings]
        parsed = parse_config(launch.config, self.catalogue)
        parsing = mock.patch("relax_core.runners.context.parse_config", lambda *_: parsed)  # once, not in each role
        parsing.start()
        try:
            async with asyncio.TaskGroup() as group:

                def play(role: Role, without_s: float | None = None) -> asyncio.Task[None]:
                    return group.create_task(run_role(role, context(role.name), without_s), name=role.name)

                self._play, self._tasks = play, {role.name: play(role) for role in roles}
        finally:
            parsing.stop()
            for task in around:
                task.cancel()
            await asyncio.gather(*around, return_exceptions=True)
            sweep(launch.run_id)
        events = self.run_status.heard
        steps = [event for event in events if isinstance(event, StepFinished)]
        outcome = RunOutcome(steps, events, self.workers.spans, await self.bus.account(), clock.now())
        await self.bus.close()
        return outcome

    async def until_event(self, kind: type[Event], step: int) -> None:
        """Wait for an event of one kind with this step or a later one."""
        heard, looked_at = self.run_status.heard, 0
        while not any(isinstance(event, kind) and event.step >= step for event in heard[looked_at:]):  # type: ignore[attr-defined]
            looked_at = len(heard)
            self.run_status.heard_more.clear()
            await self.run_status.heard_more.wait()

    async def until_call(self, method: str) -> None:
        """Wait for the first call of a method to end."""
        while not any(span.method == method for span in self.workers.spans):
            await self.clock.sleep(0.01)

    async def lose_role(self, name: str) -> None:
        """End the process of a role with its workers; another one takes its place."""
        self._tasks[name].cancel()
        await asyncio.wait({self._tasks[name]})
        await self.devices.gone(name)
        self._tasks[name] = self._play(self.catalogue.build(Chosen("role", name), Role), 0.0)


def _settings(folder: Path, tasks: Path) -> dict[str, Any]:
    return {
        "steps": 20, "plugins": [str(SCRIPTED)], "model": {"path": str(folder)}, "data": {"train": str(tasks)},
        "algorithm": "grpo", "engine": "scripted-engine", "trainer": "scripted-trainer", "weights": "scripted-transport",
        "family": "scripted-family", "rewards": ["scripted-reward"], "placement": "hybrid",
        "rollout": {"groups_per_step": 4, "group_size": 4, "max_new_tokens": 8},
        "eval": {"every": 0}, "checkpoint": {"every": 0}, "optimizer": {"lr": 0.1},
    }  # fmt: skip
