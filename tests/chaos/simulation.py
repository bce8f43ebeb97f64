# SPDX-License-Identifier: Apache-2.0
"""One start of a run in virtual time: the real roles and services, reached over a network and a disk that may fail.

Only worker processes are replaced, by objects of this process (`tests.unit.roles.simulated_run`). Everything random or
unordered is fixed, so that a seed gives the same run each time: tasks are hashed by their number, and what a thread would
do is done on the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import shutil
import sqlite3
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from relax_core.api.bus import BusSettings
from relax_core.api.component import Chosen
from relax_core.api.errors import WorkerDied
from relax_core.api.role import Role, WorkerSpec
from relax_core.api.weights import Version
from relax_core.bus.ledger import AttemptState
from relax_core.bus.service import BusService, open_bus
from relax_core.bus.store import InProcessBus
from relax_core.devices.scheduler import DeviceService
from relax_core.engines.engine_state import EngineStatus
from relax_core.registry.catalogue import Catalogue
from relax_core.rpc.host import Host
from relax_core.runners.context import RoleContext, run_role
from relax_core.runners.launch import Launch
from relax_core.runners.run_status import RunStatusService
from relax_core.weights.registry import WeightRegistry
from tests.chaos.witness import PRESENT, Witness
from tests.unit.roles.simulated_run import SimulatedWorker, Span
from tests.unit.roles.virtual_time import VirtualClock, VirtualLoop

PROBE_S = 2.0
OVERDUE_S = 120.0
"""Waits may be looked at so long after their deadline: whoever waits asks once more, and that may be slow."""


class NumberedTask(asyncio.Task):
    """A task whose place in a set does not depend on its address."""

    numbers = itertools.count()

    def __init__(self, *args: Any, **more: Any) -> None:
        self._place = next(self.numbers)
        super().__init__(*args, **more)

    def __hash__(self) -> int:
        return self._place


class NumberedFuture(asyncio.Future):
    """The same of a future."""

    def __init__(self, **more: Any) -> None:
        self._place = next(NumberedTask.numbers)
        super().__init__(**more)

    def __hash__(self) -> int:
        return self._place


class SeededLoop(VirtualLoop):
    """Virtual time without threads: work for a thread is done on the loop, after the time that the disk takes."""

    def __init__(self) -> None:
        super().__init__()
        NumberedTask.numbers = itertools.count()
        self.disk_s = 0.0
        self.set_task_factory(lambda loop, work, **more: NumberedTask(work, loop=loop, **more))

    def create_future(self) -> asyncio.Future[Any]:
        return NumberedFuture(loop=self)

    def run_in_executor(self, executor: Any, function: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        done = self.create_future()

        def work() -> None:
            try:
                value = function(*args)
            except Exception as error:
                if not done.done():
                    done.set_exception(error)
            else:
                if not done.done():
                    done.set_result(value)

        self.call_later(self.disk_s, work) if self.disk_s else work()
        return done


@dataclass
class NetworkFault:
    """The fate of one call of a service: `kind` happens to the `nth` call of `method` by `role` from `at` on."""

    at: float
    method: str
    kind: str
    role: str = ""
    nth: int = 1
    seconds: float = 0.0


@dataclass
class WorkerFault:
    """The fate of one call of a worker whose name begins with `worker`."""

    at: float
    method: str
    kind: str
    worker: str = ""
    nth: int = 1
    seconds: float = 0.0


@dataclass
class Faults:
    """Faults that wait for the call that they befall."""

    network: list[NetworkFault] = field(default_factory=list)
    workers: list[WorkerFault] = field(default_factory=list)

    def of_call(self, role: str, method: str, now: float) -> NetworkFault | None:
        for fault in self.network:
            if now >= fault.at and fault.method == method and fault.role in ("", role):
                fault.nth -= 1
                if fault.nth <= 0:
                    self.network.remove(fault)
                    return fault
        return None

    def of_work(self, worker: str, method: str, now: float) -> WorkerFault | None:
        for fault in self.workers:
            if now >= fault.at and fault.method == method and worker.startswith(fault.worker):
                fault.nth -= 1
                if fault.nth <= 0:
                    self.workers.remove(fault)
                    return fault
        return None


class RoleProcess:
    """The process of one role: what it sends goes through the network until it is dead."""

    def __init__(self, role: str, start: Start) -> None:
        self.role, self.start, self.dead = role, start, False
        self.workers = FailingWorkers(start.catalogue, start.faults, start.witness)

    def service(self, service: Any) -> Any:
        return RemoteService(service, self)


class RemoteService:
    """A service of the run as a role's process reaches it."""

    def __init__(self, service: Any, process: RoleProcess) -> None:
        self._service, self._process = service, process

    def __getattr__(self, name: str) -> Any:
        method, process = getattr(self._service, name), self._process
        faults = process.start.faults

        async def call(*args: Any, **more: Any) -> Any:
            if process.dead:
                raise WorkerDied(f"the hub is out of reach of {process.role}: {name}")
            if not faults.network:
                return await method(*args, **more)
            fault = faults.of_call(process.role, name, asyncio.get_running_loop().time())
            if fault is None:
                return await method(*args, **more)
            process.start.note(f"{fault.kind} of {process.role}'s {name}")
            if fault.kind == "lost request":
                raise WorkerDied(f"hub died during {name}: the connection was lost")
            if fault.kind == "late request":
                await asyncio.sleep(fault.seconds)
            # What was sent is done, whatever becomes of its sender.
            answer = await asyncio.shield(process.start.own(method(*args, **more)))
            if fault.kind == "twice":
                answer = await asyncio.shield(process.start.own(method(*args, **more)))
            if fault.kind == "lost answer":
                raise WorkerDied(f"hub died during {name}: the connection was lost")
            if fault.kind == "late answer":
                await asyncio.sleep(fault.seconds)
            return answer

        return call


class FailingWorker(SimulatedWorker):
    """A worker that dies or hangs in the call that a fault waits for."""

    faults: Faults

    async def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        fault = None
        if self.faults.workers:
            fault = self.faults.of_work(self.name, method, asyncio.get_running_loop().time())
        if fault is None:
            return await super().call(method, *args, timeout_s=timeout_s)
        if fault.kind == "dies before":
            await self.kill()
        elif fault.kind == "hangs":
            self.hang()
        elif fault.kind == "is slow":
            await asyncio.sleep(min(fault.seconds, timeout_s))
        answer = await super().call(method, *args, timeout_s=timeout_s)
        if fault.kind == "dies after":
            await self.kill()
            raise WorkerDied(f"worker {self.name} was killed after {method}")
        return answer


class FailingWorkers:
    """`api.Workers` of one process."""

    def __init__(self, catalogue: Catalogue, faults: Faults, witness: Witness) -> None:
        self._catalogue, self._faults, self._witness, self.closed = catalogue, faults, witness, False
        self.alive: dict[str, FailingWorker] = {}
        self.spans: list[Span] = []

    async def start(self, specs: Sequence[WorkerSpec], timeout_s: float = 120.0) -> tuple[FailingWorker, ...]:
        if self.closed:
            raise WorkerDied("workers: this process belongs to an earlier start")
        hosts = [Host.make(spec.component, spec.target, self._catalogue) for spec in specs]
        for host in hosts:
            host._instance._witness = self._witness
        made = tuple(FailingWorker(spec, host, self.spans) for spec, host in zip(specs, hosts, strict=True))
        for worker in made:
            worker.faults = self._faults
        self.alive |= {worker.name: worker for worker in made}
        return made

    async def end(self) -> None:
        self.closed = True
        for worker in self.alive.values():
            await worker.kill()


class FailingDisk:
    """The ledger's connection on a disk that may be full: a commit fails as sqlite says it then."""

    def __init__(self, database: sqlite3.Connection, witness: Witness) -> None:
        self._database, self._witness = database, witness

    def __getattr__(self, name: str) -> Any:
        return getattr(self._database, name)

    def execute(self, statement: str, *args: Any) -> Any:
        if statement == "COMMIT" and self._witness.full:
            raise sqlite3.OperationalError("database or disk is full")
        return self._database.execute(statement, *args)


class Start:
    """One start of a run on its directory: `opened -> roles at work -> finished | failed | killed`.

    Invariants: `check` finds nothing wrong at any moment; an attempt is in one of `issued`, and ends once.
    """

    def __init__(
        self, catalogue: Catalogue, launch: Launch, settings: BusSettings, version: Version, witness: Witness,
        faults: Faults, note: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.catalogue, self.launch, self.settings, self.version = catalogue, launch, settings, version
        self.witness, self.faults, self.note = witness, faults, note
        self.clock = VirtualClock()
        self.processes: dict[str, RoleProcess] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.roles: dict[str, Role] = {}
        self.former: list[tuple[RoleProcess, asyncio.Task[None]]] = []
        """Role processes that died, or live on cut off from the run."""
        self._sent: set[asyncio.Future[Any]] = set()
        self.killed = False
        PRESENT.append(witness)

    async def open(self) -> None:
        self.bus: BusService = await open_bus(
            InProcessBus(), self.settings, self.launch.run_dir, self.version, self.clock
        )
        self._watch_ledger()
        self.bus._journal._db = FailingDisk(self.bus._journal._db, self.witness)  # type: ignore[assignment]
        self.run_status, self.weights = RunStatusService(self.clock), WeightRegistry(self.clock)
        self.devices = DeviceService(self.clock)
        account, trained = self.bus.queue.account(), sum(map(len, self.witness.lineage.values()))
        if account.in_flight or not account.balanced or account.trained != trained:
            self.witness.wrong(f"opened at {self.version} with {account}, where {trained} were trained")
        for name in self.launch.plan.roles:
            self.begin_role(name)

    def begin_role(self, name: str, without_s: float | None = None) -> None:
        """Start the process of a role, in place of one that is gone where there was one."""
        process = self.processes[name] = RoleProcess(name, self)
        reached = [process.service(one) for one in (self.bus, self.weights, self.run_status, self.devices)]
        bus, weights, run_status, devices = reached

        def context(incarnation: int) -> RoleContext:
            return RoleContext(
                name, self.launch, self.catalogue, bus, weights, run_status, process.workers, process.workers,
                self.clock, incarnation, devices,
            )  # fmt: skip

        role = self.roles[name] = self.catalogue.build(Chosen("role", name), Role)
        self.tasks[name] = asyncio.create_task(run_role(role, context, without_s), name=name)

    async def lose_role(self, name: str) -> bool:
        """Kill the process of a stateless role, which another takes the place of; False where it can't be replaced."""
        task, process = self.tasks[name], self.processes[name]
        if task.done() or not self.roles[name].stateless:
            return False
        process.dead = True
        await process.workers.end()
        task.cancel()
        self.former.append((process, task))
        await self.devices.gone(name)
        self.begin_role(name, 0.0)
        return True

    async def run(self) -> BaseException | None:
        """Return when every role has ended, or with the error of the first that failed for good."""
        while running := [task for task in self.tasks.values() if not task.done()]:
            await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED, timeout=PROBE_S)
            self.check()
            if any(task.done() and not task.cancelled() and task.exception() for task in self.tasks.values()):
                break
        errors = (task.exception() for task in self.tasks.values() if task.done() and not task.cancelled())
        return next((error for error in errors if error is not None), None)

    def own(self, work: Coroutine[Any, Any, Any]) -> asyncio.Future[Any]:
        """Do what a message asks for, also when its sender is gone by then."""
        task = asyncio.ensure_future(work)
        self._sent.add(task)
        task.add_done_callback(lambda done: (self._sent.discard(done), done.cancelled() or done.exception()))
        return task

    async def kill(self) -> None:
        """End all processes of this start at once: nothing that they do reaches a service any more."""
        for process in (*self.processes.values(), *(process for process, _ in self.former)):
            process.dead = True
            await process.workers.end()
        tasks = [*self.tasks.values(), *(task for _, task in self.former), *self._sent]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def close(self) -> None:
        """Kill what is left, and close the bus. Its last commit may fail, as the disk does."""
        await self.kill()
        with contextlib.suppress(Exception):
            await self.bus.close()

    # -- checks -------------------------------------------------------------------------------------------------

    def _watch_ledger(self) -> None:
        """Write down what the queue issues, drops, trains and undoes."""
        queue, witness = self.bus.queue, self.witness
        ledger = queue.ledger
        self.issued: set[Any] = set()
        self.dropped: set[Any] = set()
        self._before = ledger.issued, sum(ledger.dropped.values()), ledger.trained
        self._covered = self.version.step
        issue, drop, train, rollback, put = ledger.issue, ledger._drop, ledger.train, queue.rollback, self.bus.put

        def issues(*args: Any) -> Any:
            group = issue(*args)
            if again := self.issued & group.members.keys():
                witness.wrong(f"issued again: {sorted(again)}")
            self.issued.update(group.members)
            return group

        def drops(member: Any, reason: Any) -> None:
            if member.id in self.dropped:
                witness.wrong(f"dropped twice: {member.id}")
            self.dropped.add(member.id)
            drop(member, reason)

        def trains(group: Any, step: int, without_gradient: Any) -> None:
            attempts = [member.id for member in group.valid]
            moving = {row.attempt_id for row in group.rows if row not in without_gradient}
            train(group, step, without_gradient)
            witness.trained(step, attempts, moving)

        def rolls_back(step: int, incarnation: int) -> Version:
            version = rollback(step, incarnation)
            witness.rolled_back(version)
            return version

        async def puts(batch: Any, sealed: Any, wait_s: float) -> bool:
            columns = (batch.columns[name].rows() for name in ("tokens", "loss_mask", "weight_versions"))
            for row, tokens, mask, versions in zip(batch.ids, *columns, strict=True):
                told = zip(tokens.tolist(), mask.tolist(), versions.tolist(), strict=True)
                found = {(token - 0x4E00, version) for token, used, version in told if used and token >= 0x4E00}
                witness.sampled[row.attempt_id] = frozenset(found)
            return await put(batch, sealed, wait_s)

        ledger.issue, ledger._drop, ledger.train = issues, drops, trains  # type: ignore[method-assign]
        queue.rollback, self.bus.put = rolls_back, puts  # type: ignore[method-assign]

    def check(self) -> None:
        """Check everything that must hold at any moment."""
        queue, witness, now = self.bus.queue, self.witness, self.clock.now()
        ledger = queue.ledger
        account = queue.account()
        if not account.balanced:
            witness.wrong(f"the account: {account.problem}")
        issued, dropped, trained = self._before
        ours = {one for step, found in witness.lineage.items() if step > self._covered for one in found}
        live = {m.id for g in ledger.live.values() for m in g.members.values() if m.state is not AttemptState.DROPPED}
        for name, left in (("both trained and dropped", ours & self.dropped), ("trained and live", ours & live),
                           ("dropped and live", live & self.dropped),
                           ("neither trained, dropped nor in flight", self.issued - ours - self.dropped - live),
                           ("never issued", (ours | self.dropped | live) - self.issued)):  # fmt: skip
            if left:
                witness.wrong(f"attempts {name}: {sorted(left)}")
        counted = (ledger.issued, sum(ledger.dropped.values()), ledger.trained)
        want = (issued + len(self.issued), dropped + len(self.dropped), trained + len(ours))
        if counted != want:
            witness.wrong(f"issued, dropped and trained are counted as {counted}, and are {want}")
        if queue.version.step != max((*witness.lineage, self._covered)) and queue.version.step > self._covered:
            witness.wrong(f"the queue is at {queue.version}, trained were {sorted(witness.lineage)}")
        if min(queue.credits.rows, queue.credits.bytes, queue.credits.kept_bytes) < 0:
            witness.wrong(f"credits below zero: {queue.credits}")
        self._check_waits(now)
        self._check_room()
        self._check_requests()

    def _check_room(self) -> None:
        """Check that no more groups are live than can be trained in time."""
        queue = self.bus.queue
        k, rule, live = queue.settings.max_staleness or 0, queue.rule, queue.ledger.live.values()
        if len(live) > (most := (k + 1) * rule.groups_per_step + rule.spare_groups):
            self.witness.wrong(f"{len(live)} groups are live, where {most} may be")
        if queue.settings.late == "mask" or queue._overdue:
            return
        step, taken = queue.version.step, sum(group.claimed for group in live)
        unclaimed = sorted(group.floor + k for group in live if not group.claimed)
        for place, last in enumerate(unclaimed):
            room = max(0, last - step + 1) * rule.groups_per_step - (taken if last >= step else 0) + rule.spare_groups
            if place + 1 > room:
                self.witness.wrong(
                    f"at {queue.version} groups expire after {unclaimed}, {taken} are claimed: they can't all fit"
                )

    def _check_requests(self) -> None:
        """Check that each awaited request is in exactly one place, and that engines have the weights that they proved."""
        worker = getattr(self.roles["rollout"], "_worker", None)
        if worker is None or self.tasks["rollout"].done():
            return
        router = worker.pool._router
        places = [*router._waiting, *(one for batch in router._restarting for one in batch)]
        places += [one for engine in router.engines.values() for one in engine.running.values() if not one.settled]
        found, awaited = sorted(one.request.id for one in places), sorted(router._open)
        if found != awaited:
            self.witness.wrong(f"requests {awaited} are awaited, and {found} wait or run")
        for name, slot in worker.engines._slots.items():
            if router.engines[name].status is not EngineStatus.SERVING or slot.loading or slot.worker is None:
                continue
            have = slot.worker._host._instance._version  # a newer one, while its receipt is on the way
            if have[1:] < slot.version[1:] and not slot.worker.dead:
                self.witness.wrong(f"{name} serves {slot.version} as the pool believes, and has {have}")

    def _check_waits(self, now: float) -> None:
        for beat in self.run_status._heartbeats.values():
            for wait in beat.waits:
                if not (wait.owner and wait.reason and wait.owed_by and math.isfinite(wait.deadline)):
                    self.witness.wrong(f"a wait without owner, reason or deadline: {wait}")
                if self.processes[beat.role].dead or self.tasks[beat.role].done():
                    continue
                if now > wait.deadline + OVERDUE_S:
                    self.witness.wrong(f"{beat.role} still waits at {now:.1f}: {wait}")


def copied(directory: Path, number: int) -> Path:
    """Copy a run's directory as a machine that dies leaves it: what was committed, and what was half-way."""
    kept = directory.with_name(f"run-{number}")
    shutil.copytree(directory, kept)
    return kept
