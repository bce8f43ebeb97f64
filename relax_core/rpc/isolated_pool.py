# SPDX-License-Identifier: Apache-2.0
"""Killable processes for plugin authors' code: rewards, environments, media processors.

Stateless items run in any process (`submit`); a `session` makes several calls to one process. The hosted class derives
from `rpc.isolated_host.IsolatedHost`; through its `parent` it calls handlers in the process of the pool.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    aclosing,
    asynccontextmanager,
    contextmanager,
    nullcontext,
    suppress,
)
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias, cast

from relax_core.api.component import Chosen
from relax_core.api.errors import (
    ConfigError,
    DeadlineExceeded,
    InfrastructureError,
    PluginError,
    RelaxError,
    WorkerDied,
)
from relax_core.api.events import RoleRecovered
from relax_core.api.role import PACKAGES_ENV, RunStatus, Worker, Workers, WorkerSpec
from relax_core.observe.console import waiting_for
from relax_core.observe.process_log import bound_fields
from relax_core.registry.error_text import said
from relax_core.registry.shapes import WrongShape, checked, shown
from relax_core.rpc.connection import Call
from relax_core.rpc.host import Failure, raised
from relax_core.rpc.isolated_host import DONE, FAILED, HEARTBEAT_S, LATE, Results, who
from relax_core.rpc.waiting import start_all

START_S = 120.0
END_S = 5.0
"""Seconds for a component to release its resources when its process ends."""
GRACE_S = 2.0
"""Seconds for the transfer of a request and its answer, added to the deadline of an item or call."""
SIDE_BY_SIDE = 64
"""Number of batches that a process with a `concurrent` host runs at once. A slow item delays only its own batch."""
MAX_BATCH = 1024
INHERITED_ENV = (
    "PATH", "PYTHON*", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "LANG", "LANGUAGE", "LC_*", "TZ", "USER", "LOGNAME", "*_NUM_THREADS",
    "TOKENIZERS_PARALLELISM", "CUDA_VISIBLE_DEVICES", *PACKAGES_ENV,
    "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "RELAX_PLUGINS", "RELAX_DISABLE_PLUGINS", "RELAX_TRACEBACKS",
)  # fmt: skip
"""Environment variables that authors' code inherits: to find Python, packages and plugins, and to set language,
threads, certificates and package indexes. All further variables, such as credentials, are inherited only if the
configuration names them.
"""
MIN_SPARE = 4
"""Smallest number of spare processes for sessions that are `alone`; a pool of more processes has one spare for each."""

Handler: TypeAlias = Callable[..., Any]
"""A function that answers calls of the child; it may return an awaitable."""
Replaced: TypeAlias = Callable[[str, str, float], Awaitable[None]]
"""A function that is called after each replacement of a process with (name, reason, seconds without a process)."""
Opened: TypeAlias = Callable[[Any], Mapping[str, Handler]]
"""A function that takes the result of the host's `open` and returns handlers, by method, for the process's calls."""


async def no_report(name: str, why: str, seconds: float) -> None:
    """Report nothing; the default of `Replaced`."""


def no_handlers(opened: Any) -> Mapping[str, Handler]:
    """Let the process make no calls; the default of `Opened`."""
    return {}


class ServedWorker(Worker, Protocol):
    """A worker that can call its parent."""

    def serve(self, call: Call) -> None:
        """Answer the worker's calls with `call(method, args)` from now on. They begin in the order in which they were made."""


@dataclass(frozen=True, slots=True)
class ProcessStarter:
    """A role's way to start processes for authors' code."""

    workers: Workers
    """The starter of child processes on the role's machine, which are `ServedWorker`s."""
    replaced: Replaced = no_report

    async def start(self, spec: WorkerSpec) -> Worker:
        (worker,) = await self.workers.start([spec], START_S)
        return worker


def untrusted(
    component: Chosen, target: str, *, memory_mb: int = 0, env: Mapping[str, str] | None = None,
    inherit_env: Sequence[str] = (), writable: Sequence[str] = (),
) -> WorkerSpec:  # fmt: skip
    """Describe the processes of a pool that run an author's component in a host class, `target`.

    `inherit_env`: variables that a process inherits besides `INHERITED_ENV`. `writable`: folders that a process may
    write to besides its scratch folder and temporary folders.
    """
    return WorkerSpec(
        "", component, target=target, memory_mb=memory_mb, env=dict(env or {}),
        inherit_env=(*INHERITED_ENV, *inherit_env), untrusted=True, writable=tuple(writable),
        preload=(target.partition(":")[0],),
    )  # fmt: skip


def replaced_events(run_status: RunStatus) -> Replaced:
    """Make a function that emits a `RoleRecovered` event for each replaced process."""

    async def report(name: str, why: str, seconds: float) -> None:
        await run_status.emit(RoleRecovered(name, seconds, f"its process was replaced: {why}"))

    return report


class ItemTimeout(Exception):
    """The item, or a session's call, exceeded its deadline; its process was killed."""


class ItemCrash(Exception):
    """The process ended while it ran this item, or with this session's state; the message has the process's status."""


class SessionLost(Exception):
    """The session's process ended or stopped answering, but several sessions had used it. Begin the session again.

    `suspect`: True if a call of this session was in progress, so that the session may be the cause; begin it again with
    `alone`.
    """

    def __init__(self, message: str, suspect: bool) -> None:
        super().__init__(message)
        self.suspect = suspect


@dataclass(slots=True, eq=False)
class Item:
    """An item of a pool: `waiting -> running -> answered`, or dropped.

    Invariant: an answered or dropped item never changes, and `answered` is called at most once.
    """

    value: Any
    answered: Callable[[Item], None]
    """Called when `result` or `error` is set."""
    fields: Mapping[str, Any]
    """Fields of the item's log records."""
    crashes: int = 0
    """Number of processes that ended while they ran only this item."""
    settled: bool = False
    error: Exception | None = None
    """ItemTimeout, ItemCrash or the error that the item raised; None for a result."""
    result: Any = None

    def settle(self, error: Exception | None, result: Any = None) -> None:
        if not self.settled:
            self.settled, self.error, self.result = True, error, result
            self.answered(self)

    def drop(self) -> None:
        """Run the item no more if it is not running yet, and ignore its answer."""
        self.settled = True


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolSettings:
    """The rules of one `IsolatedPool`."""

    timeout_s: float
    """Seconds that an item, or a call of a session, may take."""
    open_args: Sequence[Any] = ()
    """Arguments of the host's `open`."""
    opened: Opened = no_handlers
    tries: int = 2
    """Number of processes that must end while they run an item before the item counts as crashed."""
    max_batch: int = MAX_BATCH
    """Most items that are sent to a process at once."""
    pack: Callable[[list[Any]], Any] = list
    """Function that encodes a batch of items for the host's `unpack`."""
    check: Callable[[Any, Any], object] = lambda item, result: None
    """Function of an item and its result that raises WrongShape for a result that the host never sends; the process then
    counts as crashed."""
    one_session_each: bool = False
    """True: a process has one session at a time; further sessions wait."""


class IsolatedPool:
    """Killable processes of one hosted class.

    An item: `waiting -> running -> done | failed | timed out | crashed`. If a process is killed, its running items run
    again, except the item that was found to be the cause.

    Invariants:
    - An item never gets the outcome of a different item. After a process breaks, its unanswered items run again, one at
      a time and without a concurrent item, so that the first unanswered item is the cause.
    - An item that exceeds its deadline while it runs alone is timed out. Since a process may also be killed from
      outside, an item counts as crashed only after `tries` processes ended while they ran it.
    - A session keeps its process. When that process is killed, the session's calls raise; no state moves to the next
      process.
    - A session counts as the cause of a broken process only if the process never had a second session. A session that
      is `alone` has a separate process, started for it and ended with it.
    - After `fail`, every waiting and later item raises the given error. After `stop` no process is left.
    """

    def __init__(self, names: Sequence[str], spec: WorkerSpec, starter: ProcessStarter, settings: PoolSettings) -> None:
        """Make a pool of one process for each of `names`, all like `spec`; `start` starts it."""
        self._name, self._who, self._settings = names[0] if names else "", who(spec.component), settings

        def process(name: str) -> IsolatedProcess:
            return IsolatedProcess(replace(spec, name=name), starter, settings.open_args, settings.opened)

        self._processes = [process(name) for name in names]
        self._places: AbstractAsyncContextManager[Any] = (
            asyncio.Semaphore(len(names)) if settings.one_session_each else nullcontext()
        )
        num_spare = max(len(names), MIN_SPARE) if names else 0
        self._spare = [process(f"{self._name}-alone-{number}") for number in range(num_spare)]
        self._spare_places = asyncio.Semaphore(len(self._spare))
        self._waiting: deque[Item] = deque()
        self._arrived = asyncio.Event()
        """Set when items wait."""
        self._unanswered: set[Item] = set()
        self._serving: list[asyncio.Task[None]] = []
        self._sessions = 0
        self._failed: Exception | None = None

    async def start(self) -> None:
        """Start every process and its component. Raises the error of the author's constructor."""
        await start_all(*(process.ready() for process in self._processes))
        self._serving = [asyncio.create_task(self._serve(process)) for process in self._processes]

    def submit(self, value: Any) -> asyncio.Future[Any]:
        """Run an item in any process. The future raises the item's error, ItemTimeout or ItemCrash."""
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        def answered(item: Item) -> None:
            if done.done():  # the caller was cancelled
                return
            if item.error is not None:
                done.set_exception(item.error)
            else:
                done.set_result(item.result)

        item = Item(value, answered, bound_fields())
        done.add_done_callback(lambda _: item.drop())
        self.add([item])
        return done

    def add(self, items: Sequence[Item]) -> None:
        """Run items in any process. Raises the error of `fail`."""
        if self._failed is not None:
            raise self._failed
        self._unanswered.update(items)
        self._waiting += items
        self._arrived.set()

    @asynccontextmanager
    async def session(self, alone: bool = False) -> AsyncIterator[IsolatedSession]:
        """Open a session in the process with the fewest sessions; with `alone`, in a new process of its own."""
        processes = self._spare if alone else self._processes
        async with self._spare_places if alone else self._places:
            process = min(processes, key=lambda process: process.sessions)
            process.sessions += 1
            self._sessions += 1
            number = self._sessions  # read before the await below, in which further sessions may begin
            try:
                yield IsolatedSession(process, await process.ready(), number, self._settings.timeout_s)
            finally:
                process.sessions -= 1
                if alone:
                    await process.end()

    def fail(self, error: Exception) -> None:
        """Raise this error for all unanswered and later items."""
        self._failed = error
        for item in tuple(self._unanswered):
            item.settle(error)

    async def stop(self, error: Exception | None = None) -> None:
        self.fail(error or RelaxError(f"{self._name} was stopped"))
        for serving in self._serving:
            serving.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)
        await asyncio.gather(*(process.end() for process in (*self._processes, *self._spare)))

    # -- items ----------------------------------------------------------------------------------------------------

    async def _serve(self, process: IsolatedProcess) -> None:
        """Send batches of waiting items to one process; each batch is this process's share of the queue."""
        async with asyncio.TaskGroup() as batches:
            while True:
                while not self._waiting:
                    self._arrived.clear()
                    await self._arrived.wait()
                batch = [self._waiting.popleft()]
                await process.places.acquire()
                share = min(self._settings.max_batch - 1, -(-len(self._waiting) // len(self._processes)))
                batch += [self._waiting.popleft() for _ in range(share)]
                batches.create_task(self._run(process, batch))

    async def _run(self, process: IsolatedProcess, items: list[Item]) -> None:
        """Run a batch until every item is answered. If the process breaks, unanswered items run again one at a time.

        If a process can't be started, its error is raised for every item.
        """
        left = [item for item in items if not item.settled]
        try:
            try:
                left = await self._round(process, left, alone=process.width == 1 and len(left) == 1)
            finally:
                process.places.release()
            if left:
                async with process.alone():
                    while left:
                        left = await self._round(process, left, alone=True)
        except Exception as error:
            for item in items:
                item.settle(charged(error, self._who))
        finally:
            self._unanswered.difference_update(items)

    async def _round(self, process: IsolatedProcess, items: list[Item], alone: bool) -> list[Item]:
        """Send items to the process once; return the items without an answer."""
        if not items:
            return []
        worker, timeout_s = await process.ready(), self._settings.timeout_s
        left = dict(enumerate(items))
        payload = self._settings.pack([item.value for item in items])
        fields = [item.fields for item in items]
        stream: Any = worker.stream("run_items", payload, timeout_s, alone, fields, timeout_s=timeout_s + GRACE_S)
        try:
            async with aclosing(stream) as parts:
                async for part in parts:
                    with sent_by(worker):
                        results, must_replace = self._checked(part, left)
                    for number, status, value in results:
                        failed: Exception | None = ItemTimeout() if status == LATE else None
                        if status not in (DONE, LATE):
                            failed = charged(raised(value, worker.name), self._who, of_item=True)
                        left.pop(number).settle(failed, value)
                    if must_replace:
                        await process.discard(worker, "an item exceeded its deadline or its memory limit")
                        break
        except (DeadlineExceeded, WorkerDied) as error:
            await process.discard(worker, str(error))
            if alone and left:
                first = next(iter(left.values()))
                first.crashes += isinstance(error, WorkerDied)
                if isinstance(error, DeadlineExceeded):
                    first.settle(ItemTimeout())
                elif first.crashes >= self._settings.tries:
                    first.settle(ItemCrash(str(error)))
        return [item for item in left.values() if not item.settled]

    def _checked(self, part: Any, left: Mapping[int, Item]) -> Results:
        """Return results that a process sent for the items in `left`. Raises WrongShape."""
        checked(part, tuple[Sequence[tuple[int, str, Any]], bool], "results")
        numbers = [number for number, _, _ in part[0]]
        if not left.keys() >= set(numbers) or len(set(numbers)) < len(numbers):
            raise WrongShape(f"results: got the items {shown(numbers)}; want each once, of {sorted(left)}")
        for number, status, value in part[0]:
            if status == DONE:
                self._settings.check(left[number].value, value)
            elif status == FAILED:
                checked(value, Failure, "results: failure")
            elif status != LATE:
                raise WrongShape(f"results: got the status {shown(status)}; want {DONE}, {FAILED} or {LATE}")
        return part[0], part[1]


@contextmanager
def sent_by(worker: Worker) -> Iterator[None]:
    """Turn a WrongShape of the body into WorkerDied: a process that sends messages of a wrong shape counts as crashed."""
    try:
        yield
    except WrongShape as error:
        raise WorkerDied(f"worker {worker.name} (pid {worker.pid}) sent a message of another shape: {error}") from error


def charged(error: Exception, who: str, of_item: bool = False) -> Exception:
    """Return the error to raise for an error that an author's process sent; the author is charged for the error.

    Errors that a component may raise keep their type; with `of_item`, ValueError does too. Any other error becomes a
    PluginError of `who`.
    """
    if isinstance(error, ConfigError | PluginError | InfrastructureError) or (
        of_item and isinstance(error, ValueError)
    ):
        return error
    return PluginError(who, said(error))


class IsolatedProcess:
    """One process of a pool and its replacements.

    Life cycle: `starting -> ready -> busy -> killed -> starting`. An `IsolatedPool` has several; `SandboxPool` has one.

    Invariants:
    - At most one process exists at a time. `worker` is set once it is ready, until `discard`.
    - A killed process is replaced once, by the next caller of `ready`, even if several callers wait. The replacements
      of `maths` are named `maths.1`, `maths.2`.
    - A second `discard` of the same worker does nothing, so every caller that notices the failure may call `discard`.
    """

    def __init__(
        self, spec: WorkerSpec, starter: ProcessStarter, open_args: Sequence[Any] = (), opened: Opened = no_handlers
    ) -> None:
        self._spec, self._starter, self._open_args, self._opened = spec, starter, open_args, opened
        self._lost: tuple[str, float] | None = None
        """(reason, time) of the discard of a broken worker until its replacement is ready, else None."""
        self.worker: Worker | None = None
        self.sessions = 0
        self.users: set[int] = set()
        """Numbers of all sessions that the present worker has had, including ended sessions."""
        self.width = 1
        self.places = asyncio.Semaphore(1)
        self._ends = False
        self._started = 0
        self._starting = asyncio.Lock()  # held across a start, so that concurrent callers get the same process
        self._clearing = asyncio.Lock()

    async def ready(self) -> Worker:
        """Return the running process, or start one. Raises the error of its component's `open`."""
        async with self._starting:
            if self.worker is None:
                name = f"{self._spec.name}.{self._started}" if self._started else self._spec.name
                self._started += 1
                component = who(self._spec.component)
                with waiting_for(f"starting the process of {component}"):
                    worker = await self._starter.start(replace(self._spec, name=name))
                try:
                    with waiting_for(f"opening {component}"):
                        started = await worker.call("start", *self._open_args, timeout_s=START_S)
                    concurrent, self._ends, opened = checked(started, tuple[bool, bool, Any], "start")
                    handlers = self._opened(opened)
                except WrongShape as error:
                    await worker.kill()
                    raise PluginError(component, f"its process sent a message of another shape: {error}") from error
                except Exception as error:
                    await worker.kill()
                    if (blamed := charged(error, component)) is not error:
                        raise blamed from error
                    raise
                except BaseException:
                    await worker.kill()
                    raise
                if concurrent and self.width == 1:
                    self.width, self.places = SIDE_BY_SIDE, asyncio.Semaphore(SIDE_BY_SIDE)
                if handlers:
                    cast(ServedWorker, worker).serve(_answering(handlers))
                self.worker, self.users = worker, set()
                if self._lost is not None:
                    (why, lost_at), self._lost = self._lost, None
                    await self._starter.replaced(self._spec.name, why, asyncio.get_running_loop().time() - lost_at)
            return self.worker

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """Wait until the process runs no batch, and keep all batches waiting while the body runs."""
        taken = 0
        async with self._clearing:
            try:
                for _ in range(self.width):
                    await self.places.acquire()
                    taken += 1
                yield
            finally:
                for _ in range(taken):
                    self.places.release()

    async def discard(self, worker: Worker, why: str) -> bool:
        """Kill a broken process; return False if that was done before. `why` is empty if the process is not broken."""
        if self.worker is not worker:
            return False
        self.worker = None
        self._lost = (why, asyncio.get_running_loop().time()) if why else None
        await worker.kill()
        return True

    async def end(self, within_s: float = END_S) -> None:
        """Let the component release its resources, for at most `within_s`, and kill the process."""
        if (worker := self.worker) is not None:
            if self._ends:
                with suppress(DeadlineExceeded, WorkerDied):
                    await worker.call("finish", timeout_s=within_s)
            await self.discard(worker, "")


class IsolatedSession:
    """Calls to one process that share state there, under the session's `number`. The state is lost with the process.

    If the process breaks, calls raise SessionLost, or ItemTimeout or ItemCrash if the session was always alone in it.
    """

    def __init__(self, process: IsolatedProcess, worker: Worker, number: int, timeout_s: float) -> None:
        self.number = number
        self._process, self._worker, self._timeout_s = process, worker, timeout_s
        self._silence_s = timeout_s + GRACE_S
        self._users = process.users
        self._users.add(number)
        self._heard: deque[tuple[float, float]] = deque()
        """(time, seconds that the loop was blocked until then) of a long call's heartbeats in the last `timeout_s`."""

    @property
    def alone(self) -> bool:
        """True if the process has never had a second session, so that this session is the cause of its failures."""
        return len(self._users) == 1

    async def call(self, method: str, *args: Any, wanted: Any = Any) -> Any:
        """Call a public method of the host with the session's number; `wanted` is the type of its result.

        Kill the process if no answer comes in time, or an answer of another type.
        """
        if self._process.worker is not self._worker:
            raise self._broken("process was replaced", suspect=False)
        left_s = self._silence_s - (asyncio.get_running_loop().time() - self._heard[-1][0] if self._heard else 0.0)
        try:
            answer = await self._worker.call(method, self.number, *args, timeout_s=max(left_s, HEARTBEAT_S))
            with sent_by(self._worker):
                return checked(answer, wanted, method)
        except (DeadlineExceeded, WorkerDied) as error:
            raise await self._lost(error) from error
        except (ValueError, LookupError, NotImplementedError) as error:
            raise charged(error, self._worker.name) from error

    async def long_call(self, method: str, *args: Any, wanted: Any = Any) -> Any:
        """Call a coroutine method of the host without a time limit, as long as the process sends heartbeats.

        `wanted` is the type of its result; a process that sends another type is killed.
        """
        heartbeat_s = min(HEARTBEAT_S, self._timeout_s / 10)
        now = asyncio.get_running_loop().time
        stream: Any = self._worker.stream(
            "long_call", heartbeat_s, method, self.number, *args, timeout_s=self._silence_s
        )
        self._heard.append((now(), 0.0))
        results: Sequence[Any] = ()
        try:
            async with aclosing(stream) as parts:
                async for part in parts:
                    with sent_by(self._worker):
                        blocked_s, results = checked(part, tuple[float, Sequence[Any]], method)
                        for result in results:
                            checked(result, wanted, method)
                    self._heard.append((now(), blocked_s))
                    while now() - self._heard[0][0] > self._timeout_s:
                        self._heard.popleft()
        except (DeadlineExceeded, WorkerDied) as error:
            raise await self._lost(error) from error
        self._heard.clear()
        if not results:
            raise self._broken(f"{method} was cancelled", suspect=False)
        return results[0]

    def blocked_s(self) -> float:
        """Return how many of the last `timeout_s` seconds the process's event loop was blocked in a long call."""
        if not self._heard:
            return 0.0
        (_, before), (heard_at, blocked_s) = self._heard[0], self._heard[-1]
        silent_s = asyncio.get_running_loop().time() - heard_at - 2 * min(HEARTBEAT_S, self._timeout_s / 10)
        return blocked_s - before + max(silent_s, 0.0)

    async def discard(self) -> None:
        """Kill the process after it ran out of memory, with the state of all its sessions."""
        await self._process.discard(self._worker, "it ran out of memory")

    async def _lost(self, error: Exception) -> Exception:
        await self._process.discard(self._worker, str(error))
        if isinstance(error, DeadlineExceeded) and self.alone:
            return ItemTimeout()
        return self._broken(f"process ended: {error}", suspect=True)

    def _broken(self, message: str, suspect: bool) -> Exception:
        return ItemCrash(message) if self.alone else SessionLost(f"{message}; other samples ran in it", suspect)


def _answering(handlers: Mapping[str, Handler]) -> Call:
    """Return a function that answers the calls of a process with its handlers."""

    async def work(method: str, args: Sequence[Any]) -> object:
        if method not in handlers:
            raise ConfigError("call to the parent", repr(method), f"call one of {', '.join(handlers)}")
        answer = handlers[method](*args)
        return await answer if inspect.isawaitable(answer) else answer

    async def answer(method: str, args: Sequence[Any]) -> object:
        working = asyncio.ensure_future(work(method, args))  # a task of its own, which the run may cancel
        try:
            return await working
        except asyncio.CancelledError:
            if getattr(asyncio.current_task(), "cancelling", int)():
                raise
            raise InfrastructureError(f"{method} was cancelled by the run") from None

    return answer
