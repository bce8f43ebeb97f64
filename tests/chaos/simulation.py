# SPDX-License-Identifier: Apache-2.0
"""One start of a run in virtual time: the real roles and services, reached over a network and a disk that may fail.

Only worker processes are replaced, by objects of this process (`tests.unit.roles.simulated_run`). Everything random or
unordered is fixed, so that a seed gives the same run each time: tasks are hashed by their number, and what a thread would
do is done on the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import math
import shutil
import sqlite3
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextvars import copy_context
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from relax_core.api.bus import BusSettings
from relax_core.api.component import Chosen
from relax_core.api.errors import DeadlineExceeded, WorkerDied
from relax_core.api.role import Role, WorkerSpec
from relax_core.api.weights import Version
from relax_core.bus.ledger import AttemptState
from relax_core.bus.service import BusService, open_bus
from relax_core.bus.store import InProcessBus
from relax_core.devices.scheduler import DeviceService
from relax_core.engines.engine_state import EngineStatus
from relax_core.registry.catalogue import Catalogue
from relax_core.rpc import messages
from relax_core.rpc.host import Host
from relax_core.runners.context import RoleContext, run_role
from relax_core.runners.launch import Launch
from relax_core.runners.replicas import TAKEOVER_S, ReplicaTracker
from relax_core.runners.run_status import RunStatusService
from relax_core.tensor_files.mapped_files import sweep
from relax_core.weights.registry import WeightRegistry
from tests.chaos.witness import PRESENT, Witness
from tests.unit.roles.virtual_time import VirtualClock, VirtualLoop

PROBE_S = 2.0
OVERDUE_S = 120.0
"""Waits may be looked at so long after their deadline: whoever waits asks once more, and that may be slow."""


class NumberedTask(asyncio.Task):
    """A task whose place in a set does not depend on its address."""

    _place = -1

    def __hash__(self) -> int:
        if self._place < 0:
            self._place = next(self.get_loop().numbers)  # type: ignore[attr-defined]
        return self._place


class NumberedFuture(asyncio.Future):
    """The same of a future."""

    _place = -1
    __hash__ = NumberedTask.__hash__


class SeededHandle(asyncio.Handle):
    """A handle that takes no notes for a debugger."""

    __slots__ = ()

    def __init__(self, callback: Any, args: Any, loop: Any, context: Any) -> None:
        self._context = copy_context() if context is None else context
        self._loop, self._callback, self._args = loop, callback, args
        self._cancelled, self._repr, self._source_traceback = False, None, None


class SeededTimer(SeededHandle):
    """The same of a timer, which a heap of the loop orders."""

    __slots__ = ("_when",)

    def when(self) -> float:
        return self._when  # type: ignore[no-any-return]


class SeededLoop(VirtualLoop):
    """Virtual time with seeded order. A turn of the loop asks the operating system for nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = itertools.count()
        self._timers: list[tuple[float, int, asyncio.Handle]] = []
        self.set_task_factory(lambda loop, work, **more: NumberedTask(work, loop=loop, **more))

    def create_future(self) -> asyncio.Future[Any]:
        return NumberedFuture(loop=self)

    def time(self) -> float:
        return self._now

    def call_soon(self, callback: Callable[..., Any], *args: Any, context: Any = None) -> asyncio.Handle:
        handle = SeededHandle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_at(
        self, when: float, callback: Callable[..., Any], *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        timer: Any = SeededTimer(callback, args, self, context)
        timer._when = when
        heapq.heappush(self._timers, (when, next(self.numbers), timer))
        return timer  # type: ignore[no-any-return]

    def _run_once(self) -> None:
        """Run what is ready; where nothing is, let the time of the next timer come."""
        ready, timers = self._ready, self._timers
        while timers and timers[0][2]._cancelled:
            heapq.heappop(timers)
        if not ready and not self._stopping:
            if not timers:
                raise RuntimeError("every task waits and no timer is set: somebody waits for ever")
            self._now = max(self._now, timers[0][0])
        while timers and timers[0][0] <= self._now:
            ready.append(heapq.heappop(timers)[2])
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle._cancelled:
                try:
                    handle._context.run(handle._callback, *handle._args)
                except (SystemExit, KeyboardInterrupt):
                    raise
                except BaseException as error:
                    self.call_exception_handler({"message": f"in {handle!r}", "exception": error, "handle": handle})


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
        self.role, self.start, self.dead, self.pid = role, start, False, next(start.pids)
        self.workers = FailingWorkers(start.catalogue, start.faults, start.witness)
        """Workers that die with it."""

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

        self.__dict__[name] = call
        return call


class FailingWorker:
    """A worker process: what it is asked it does to the end, also when whoever asked is gone, until it is killed or hangs.

    Invariants:
    - Values pass the wire format.
    - Each answer and each item of a stream reaches its reader, or WorkerDied does.
    """

    def __init__(self, spec: WorkerSpec, host: Host, faults: Faults) -> None:
        self.name, self.pid, self.host, self._host, self._faults = spec.name, 0, "127.0.0.1", host, faults
        self.dead = self._hangs = False
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def instance(self) -> Any:
        """The component that it hosts."""
        return self._host.instance

    async def free_port(self, address: str) -> int:
        return 1

    async def answer(self, process: RoleProcess, method: str, args: Sequence[Any], timeout_s: float) -> Any:
        """Do what the process of its role asks for."""
        fault = None
        if self._faults.workers:
            fault = self._faults.of_work(self.name, method, asyncio.get_running_loop().time())
        if fault is not None and fault.kind == "dies before":
            await self.kill()
        elif fault is not None and fault.kind == "hangs":
            self.hang()
        elif fault is not None and fault.kind == "is slow":
            await asyncio.sleep(min(fault.seconds, timeout_s))
        self._check(process, method)
        task = self._begin(self._call(method, _travelled(args)))
        try:
            async with asyncio.timeout(timeout_s) as deadline:
                answer = await asyncio.shield(task)
        except TimeoutError:
            if not deadline.expired():
                raise
            raise DeadlineExceeded(self.name, method, timeout_s) from None
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if caller is not None and caller.cancelling() or not self.dead:
                raise
            raise WorkerDied(f"worker {self.name} was killed during {method}") from None
        if fault is not None and fault.kind == "dies after":
            await self.kill()
            raise WorkerDied(f"worker {self.name} was killed after {method}")
        return _travelled(answer)

    async def read(
        self, process: RoleProcess, method: str, args: Sequence[Any], timeout_s: float
    ) -> AsyncIterator[Any]:
        """Yield the items of a stream to a process; a reader that leaves ends it, one that dies does not."""
        self._check(process, method)
        items: asyncio.Queue[tuple[str, Any]] = asyncio.Queue()
        task = self._begin(self._stream(method, _travelled(args), items))
        try:
            while True:
                try:
                    async with asyncio.timeout(timeout_s):
                        kind, item = await items.get()
                except TimeoutError:
                    raise DeadlineExceeded(self.name, method, timeout_s) from None
                if kind == "end":
                    return
                if kind == "error":
                    raise item
                yield item
        finally:
            if not process.dead:
                task.cancel()

    def hang(self) -> None:
        """Live on, and say nothing any more."""
        self._hangs = True

    async def stop(self, timeout_s: float = 5.0) -> None:
        await self.kill()

    async def kill(self) -> None:
        self.dead = True
        for task in self._tasks:
            task.cancel()

    def _check(self, process: RoleProcess, method: str) -> None:
        if process.dead:
            raise WorkerDied(f"{self.name} is out of reach of the dead {process.role}: {method}")
        if self.dead:
            raise WorkerDied(f"worker {self.name} is dead: {method}")

    def _begin(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._end)
        return task

    def _end(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # of a call whose caller is gone

    async def _call(self, method: str, args: Sequence[Any]) -> Any:
        if not self._hangs:
            answer = await self._host.call(method, args)
        if self._hangs:
            await asyncio.get_running_loop().create_future()
        return answer

    async def _stream(self, method: str, args: Sequence[Any], items: asyncio.Queue[tuple[str, Any]]) -> None:
        try:
            async for item in self._host.stream(method, args):
                if self._hangs:
                    await asyncio.get_running_loop().create_future()
                items.put_nowait(("item", _travelled(item)))
            items.put_nowait(("end", None))
        except asyncio.CancelledError:
            items.put_nowait(("error", WorkerDied(f"worker {self.name} ended {method}")))
            raise
        except Exception as error:
            items.put_nowait(("error", error))


def _travelled(value: Any) -> Any:
    return messages.decode(messages.encode(value))


class FailingWorkers:
    """`api.Workers` of one process."""

    def __init__(self, catalogue: Catalogue, faults: Faults, witness: Witness) -> None:
        self._catalogue, self._faults, self._witness, self.closed = catalogue, faults, witness, False
        self.alive: dict[str, FailingWorker] = {}

    async def start(self, specs: Sequence[WorkerSpec], timeout_s: float = 120.0) -> tuple[FailingWorker, ...]:
        if self.closed:
            raise WorkerDied("workers: this process belongs to an earlier start")
        made = []
        for spec in specs:
            host = Host.make(spec.component, spec.target, self._catalogue)
            host.instance._witness = self._witness
            made.append(FailingWorker(spec, host, self._faults))
        for worker in made:
            if (former := self.alive.get(worker.name)) is not None and not former.dead:
                self._witness.wrong(f"{worker.name} is started while another of its name lives")
            self.alive[worker.name] = worker
        return tuple(made)

    async def end(self) -> None:
        """Kill all; nothing is started any more."""
        self.closed = True
        for worker in self.alive.values():
            await worker.kill()


class ReachedWorker:
    """`api.role.Worker`: a worker as the process of its role reaches it, while that lives."""

    def __init__(self, worker: FailingWorker, process: RoleProcess) -> None:
        self.name, self.pid, self.host = worker.name, worker.pid, worker.host
        self.worker, self._process = worker, process

    async def free_port(self, address: str) -> int:
        return await self.worker.free_port(address)

    async def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        return await self.worker.answer(self._process, method, args, timeout_s)

    def stream(self, method: str, *args: Any, timeout_s: float) -> AsyncIterator[Any]:
        return self.worker.read(self._process, method, args, timeout_s)

    async def stop(self, timeout_s: float = 5.0) -> None:
        await self.kill()

    async def kill(self) -> None:
        if not self._process.dead:
            await self.worker.kill()


class ReachedWorkers:
    """`api.role.Workers` of one role process."""

    def __init__(self, process: RoleProcess) -> None:
        self._process = process

    async def start(self, specs: Sequence[WorkerSpec], timeout_s: float = 120.0) -> tuple[ReachedWorker, ...]:
        found = await self._process.workers.start(specs, timeout_s)
        return tuple(ReachedWorker(worker, self._process) for worker in found)

    async def close(self) -> None:
        for worker in self._process.workers.alive.values():
            await ReachedWorker(worker, self._process).kill()


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
        self.contexts: dict[str, RoleContext] = {}
        """The newest of each role."""
        self.former: list[tuple[RoleProcess, asyncio.Task[None]]] = []
        """Role processes that died."""
        self.pids = itertools.count(1)
        self._sent: set[asyncio.Future[Any]] = set()
        PRESENT.append(witness)

    async def open(self) -> None:
        sweep(self.launch.run_id)
        self.bus: BusService = await open_bus(
            InProcessBus(), self.settings, self.launch.run_dir, self.version, self.clock, self.launch.epoch_number
        )
        self._watch_ledger()
        self.bus._journal._db = FailingDisk(self.bus._journal._db, self.witness)  # type: ignore[assignment]
        self.run_status, self.weights = RunStatusService(self.clock), WeightRegistry(self.clock)
        self.devices = DeviceService(self.clock)
        account, trained = self.bus.queue.account(), sum(map(len, self.witness.lineage.values()))
        if account.in_flight or not account.balanced or account.trained != trained:
            self.witness.wrong(f"opened at {self.version} with {account}, where {trained} were trained")
        for name in self.launch.plan.roles:
            self.roles[name] = self.catalogue.build(Chosen("role", name), Role)
        self.replicas = ReplicaTracker(self.roles)
        for name in self.roles:
            self.tasks[name] = asyncio.create_task(self._play(name, RoleProcess(name, self)), name=name)

    async def _play(self, name: str, process: RoleProcess) -> None:
        """Run a role in a process, as a shell does: to its end, and with it that of its workers."""
        now = self.clock.now()
        since = self.replicas.enter(name, process.pid, now)
        self.processes[name] = process
        reached = [process.service(one) for one in (self.bus, self.weights, self.run_status, self.devices)]
        bus, weights, run_status, devices = reached
        workers = ReachedWorkers(process)
        role = self.roles[name] = self.catalogue.build(Chosen("role", name), Role)

        def context(incarnation: int) -> RoleContext:
            made = self.contexts[name] = RoleContext(
                name, self.launch, self.catalogue, bus, weights, run_status, workers, workers, self.clock, incarnation,
                devices,
            )  # fmt: skip
            return made

        try:
            await run_role(role, context, None if since is None else now - since)
        finally:
            if not process.dead:
                self.replicas.end(name)

    async def lose_role(self, name: str, without_s: float) -> bool:
        """Kill the process of a role with its workers; False where there is none.

        Another takes its place after `without_s`, if the role has not died too often.
        """
        task, process = self.tasks[name], self.processes.get(name)
        if task.done() or process is None or process.dead:
            return False
        process.dead = True
        await process.workers.end()
        task.cancel()
        self.former.append((process, task))
        lost_at = self.clock.now()
        loss = self.replicas.lost(name, process.pid, lost_at)
        if loss is None:
            return False
        await self.devices.gone(name)
        succession = self._fail(loss.reason) if loss.fatal else self._take_over(name, without_s, lost_at)
        self.tasks[name] = asyncio.create_task(succession, name=name)
        return True

    async def _fail(self, reason: str) -> None:
        raise WorkerDied(reason)

    async def _take_over(self, name: str, without_s: float, lost_at: float) -> None:
        """Run a role again in a process that comes late, or never."""
        await asyncio.sleep(min(without_s, TAKEOVER_S))
        if without_s >= TAKEOVER_S and self.replicas.absent(name, lost_at):
            raise WorkerDied(f"role {name}: its process died and no other came within {TAKEOVER_S:.0f} s")
        await self._play(name, RoleProcess(name, self))

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

    def living(self) -> list[tuple[str, str, FailingWorker]]:
        """List name, role and worker of all worker processes that live."""
        own = [(process.role, process.workers) for process in self.processes.values()]
        found = [(name, role, worker) for role, workers in own for name, worker in workers.alive.items()]
        return sorted((one for one in found if not one[2].dead), key=lambda one: one[:2])

    def cut_off(self) -> None:
        """Let nothing be started any more."""
        for process in self.processes.values():
            process.workers.closed = True

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

        check, claim, leases = queue.leases.check, queue.claim, queue.leases

        def checks(asked: Any, now: float) -> Any:
            held = leases.out.get(asked.lease)
            ends = math.inf if held is None else held.expires
            lease = check(asked, now)
            if ends <= now:
                witness.wrong(f"lease {asked.lease} of {asked.task} is used at {now:.1f} and ran out at {ends:.1f}")
            if lease.expires < now + leases.lease_s:
                witness.wrong(f"lease {asked.lease} of {asked.task} is used and not renewed")
            return lease

        def claims(request: Any, now: float) -> Any:
            if (granted := claim(request, now)) is not None and request.trains:
                self._check_room()
            return granted

        ledger.issue, ledger._drop, ledger.train = issues, drops, trains  # type: ignore[method-assign]
        queue.rollback, self.bus.put, queue.claim = rolls_back, puts, claims  # type: ignore[method-assign]
        leases.check = checks  # type: ignore[method-assign]

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
        found, awaited = sorted(one.id for one in places), sorted(router._open)
        if found != awaited:
            self.witness.wrong(f"requests {awaited} are awaited, and {found} wait or run")
        for name, slot in worker.engines._slots.items():
            if slot.state.status is not EngineStatus.SERVING or slot.state.loading or slot.worker is None:
                continue
            have = slot.worker.worker.instance._version  # a newer one, while its receipt is on the way
            if have[1:] < slot.state.loaded[1:] and not slot.worker.worker.dead:
                self.witness.wrong(f"{name} serves {slot.state.loaded} as the pool believes, and has {have}")

    def _check_waits(self, now: float) -> None:
        for beat in self.run_status._heartbeats.values():
            for wait in beat.waits:
                if not (wait.role and wait.reason and wait.blocked_by and math.isfinite(wait.deadline)):
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
