# SPDX-License-Identifier: Apache-2.0
"""Processes that run code of authors and can be killed: rewards, environments and media processors are called through here.

Items without state go to any process (`submit`); whoever needs the same process for several calls opens a `session`. The
hosted class derives from `rpc.host.IsolatedHost`, whose `parent` calls the handlers given here.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from relax_core.api.component import Chosen
from relax_core.api.errors import ConfigError, DeadlineExceeded, RelaxError, WorkerDied
from relax_core.api.events import RoleRecovered
from relax_core.api.role import RunStatus, Worker, Workers, WorkerSpec
from relax_core.rpc import messages
from relax_core.rpc.host import DONE, HEARTBEAT_S, LATE, Failure, describe, raised
from relax_core.rpc.waiting import start_all

START_S = 120.0
END_S = 5.0
"""For a component to release what it took when its process ends."""
GRACE_S = 2.0
"""Added to an item's or call's own deadline before silence of the process counts: the way there and back."""
ANSWER_S = 60.0
STILL_WORKING_S = 15.0
"""Interval at which a child is told that its call is being worked on; it gives up when it hears nothing for much longer."""
UNBOUNDED_S = 1e9
"""Silence of the request stream: whether a process lives is seen by those who wait for its work."""
SIDE_BY_SIDE = 64
"""Batches at once in a process whose items are awaitable: a slow item keeps only its own batch waiting."""
MAX_BATCH = 1024
INHERITED_ENV = (
    "PATH", "PYTHON*", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "LANG", "LANGUAGE", "LC_*", "TZ", "USER", "LOGNAME", "*_NUM_THREADS",
    "TOKENIZERS_PARALLELISM", "CUDA_VISIBLE_DEVICES", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE",
    "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "RELAX_PLUGINS", "RELAX_DISABLE_PLUGINS", "RELAX_TRACEBACKS",
)  # fmt: skip
"""Variables of the starting process that code of authors sees: what finds Python, its packages and the plugins, and what
settles language, threads and certificates. No other one, and so no credential, unless the configuration names it."""
MIN_SPARE = 4
"""Sessions that may be alone in a process at once, beside the pool's own processes, where the pool has fewer."""

Handler: TypeAlias = Callable[..., Any]
"""Answers calls of the child; it may return an awaitable."""
Replaced: TypeAlias = Callable[[str, str, float], Awaitable[None]]
"""Told that a process was replaced: (name of the first one, why, seconds without one)."""
Opened: TypeAlias = Callable[[Any], Mapping[str, Handler]]
"""Takes what the host's `open` returned; gives the handlers for this process's calls, none: it makes none."""


async def no_report(name: str, why: str, seconds: float) -> None:
    """Tell nobody."""


def replaced_events(run_status: RunStatus) -> Replaced:
    """Make each replacement an event of the run, by the name of the process."""

    async def report(name: str, why: str, seconds: float) -> None:
        await run_status.emit(RoleRecovered(name, seconds, f"its process was replaced: {why}"))

    return report


class ItemTimeout(Exception):
    """The item, or a session's call, was not done within its deadline; its process was killed."""


class ItemCrash(Exception):
    """The process ended on this item, or with this session's state; the message says how."""


class SessionLost(Exception):
    """The session's process ended or fell silent after other sessions had used it too: nobody can be blamed. Begin again.

    `suspect`: one of its own calls was under way, so that it may have been the one; begin again alone.
    """

    def __init__(self, message: str, suspect: bool) -> None:
        super().__init__(message)
        self.suspect = suspect


class IsolatedPool:
    """Killable processes of one hosted class.

    An item: `waiting -> running -> done | failed | timed out | crashed`; running items of a process that was killed
    wait again, unless they were found to have broken it.

    Invariants:
    - An item has one outcome, and the outcome of another never becomes its own: those that were in a process when it broke run
      again there, one at a time and without company, so that the first one unanswered is the one that broke it.
    - A deadline that was exceeded alone is the item's. A process may be killed from outside, so a crash is the item's only
      after `tries` processes ended on it.
    - A session keeps its process; when that is killed, the session's calls raise, and no state moves to the next process.
    - A session is blamed only for a process that no other session was in; one that is `alone` has a process of its own, new at
      its start and killed at its end.
    - After `fail` every waiting and later item raises that error; after `stop` no process is left.
    """

    def __init__(
        self, names: Sequence[str], component: Chosen, target: str, workers: Workers, *, timeout_s: float,
        open_args: Sequence[Any] = (), opened: Opened = lambda result: {}, memory_mb: int = 0,
        env: Mapping[str, str] | None = None, inherit_env: Sequence[str] = (), writable: Sequence[str] = (), tries: int = 2,
        max_batch: int = MAX_BATCH, pack: Callable[[list[Any]], Any] = list, one_session_each: bool = False,
        replaced: Replaced = no_report,
    ) -> None:  # fmt: skip
        """`names`: a process each. `inherit_env`: variables of this process that they see besides `INHERITED_ENV`.

        `writable`: folders of the run directory that they write to. `one_session_each`: a process has one session at a
        time; others wait for it.
        """
        self._spec = WorkerSpec(
            names[0] if names else "", component, target=target, memory_mb=memory_mb, env=dict(env or {}),
            inherit_env=(*INHERITED_ENV, *inherit_env), untrusted=True, writable=tuple(writable),
        )  # fmt: skip
        self._timeout_s, self._tries, self._max_batch, self._pack = timeout_s, tries, max_batch, pack
        self._processes = [IsolatedProcess(name, self._spec, workers, open_args, opened, replaced) for name in names]
        self._places: AbstractAsyncContextManager[Any] = (
            asyncio.Semaphore(len(names)) if one_session_each else nullcontext()
        )
        self._spare = [
            IsolatedProcess(f"{self._spec.name}-alone-{number}", self._spec, workers, open_args, opened, replaced)
            for number in range(max(len(names), MIN_SPARE) if names else 0)
        ]
        self._spare_places = asyncio.Semaphore(len(self._spare))
        self._waiting: asyncio.Queue[_Item] = asyncio.Queue()
        self._unanswered: set[asyncio.Future[Any]] = set()
        self._serving: list[asyncio.Task[None]] = []
        self._sessions = 0
        self._failed: Exception | None = None

    async def start(self) -> None:
        """Start every process and its component; an error of the author's constructor comes out here."""
        await start_all(*(process.ready() for process in self._processes))
        self._serving = [asyncio.create_task(self._serve(process)) for process in self._processes]

    def submit(self, item: Any) -> asyncio.Future[Any]:
        """Let some process run an item; the future raises what the item raised, ItemTimeout or ItemCrash."""
        if self._failed is not None:
            raise self._failed
        done = asyncio.get_running_loop().create_future()
        self._unanswered.add(done)
        done.add_done_callback(self._unanswered.discard)
        self._waiting.put_nowait(_Item(item, done))
        return done

    @asynccontextmanager
    async def session(self, alone: bool = False) -> AsyncIterator[IsolatedSession]:
        """Open calls to one process: the one with the fewest sessions, or a new one that nobody else gets (`alone`)."""
        processes = self._spare if alone else self._processes
        async with self._spare_places if alone else self._places:
            process = min(processes, key=lambda process: process.sessions)
            process.sessions += 1
            self._sessions += 1
            number = self._sessions  # before others begin, while the process starts
            try:
                yield IsolatedSession(process, await process.ready(), number, self._timeout_s)
            finally:
                process.sessions -= 1
                if alone:
                    await process.end()

    def fail(self, error: Exception) -> None:
        """Answer all that wait, and whoever comes later, with this error."""
        self._failed = error
        for done in tuple(self._unanswered):
            if not done.done():
                done.set_exception(error)

    async def stop(self, error: Exception | None = None) -> None:
        self.fail(error or RelaxError(f"{self._spec.name} was stopped"))
        for serving in self._serving:
            serving.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)
        await asyncio.gather(*(process.end() for process in (*self._processes, *self._spare)))

    # -- items ----------------------------------------------------------------------------------------------------

    async def _serve(self, process: IsolatedProcess) -> None:
        """Share the waiting items out among the processes."""
        async with asyncio.TaskGroup() as batches:
            while True:
                batch = [await self._waiting.get()]
                await process.places.acquire()
                share = min(self._max_batch - 1, -(-self._waiting.qsize() // len(self._processes)))
                batch += [self._waiting.get_nowait() for _ in range(share)]
                batches.create_task(self._run(process, batch))

    async def _run(self, process: IsolatedProcess, items: list[_Item]) -> None:
        """Answer each item. Those that a broken process left run again without company; what keeps a process from starting is
        the error of all of them."""
        left = [item for item in items if not item.done.done()]
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
                item.settle(error)

    async def _round(self, process: IsolatedProcess, items: list[_Item], alone: bool) -> list[_Item]:
        """Send items through the process once; return those without an answer."""
        if not items:
            return []
        worker = await process.ready()
        left = dict(enumerate(items))
        payload = self._pack([item.value for item in items])
        stream: Any = worker.stream("run_items", payload, self._timeout_s, alone, timeout_s=self._timeout_s + GRACE_S)
        try:
            async with aclosing(stream) as parts:
                async for results, must_replace in parts:
                    for number, status, value in results:
                        failed: Exception | None = ItemTimeout() if status == LATE else None
                        if status not in (DONE, LATE):
                            failed = raised(value, worker.name)
                        left.pop(number).settle(failed, value)
                    if must_replace:
                        await process.discard(worker, "an item outlasted its deadline or its memory")
                        break
        except (DeadlineExceeded, WorkerDied) as error:
            await process.discard(worker, str(error))
            if alone and left:
                first = next(iter(left.values()))
                first.crashes += isinstance(error, WorkerDied)
                if isinstance(error, DeadlineExceeded):
                    first.settle(ItemTimeout())
                elif first.crashes >= self._tries:
                    first.settle(ItemCrash(str(error)))
        return [item for item in left.values() if not item.done.done()]


@dataclass(slots=True, eq=False)
class _Item:
    value: Any
    done: asyncio.Future[Any]
    crashes: int = 0

    def settle(self, error: Exception | None, value: Any = None) -> None:
        if self.done.done():
            return
        if error is not None:
            self.done.set_exception(error)
        else:
            self.done.set_result(value)


class IsolatedProcess:
    """One process of a pool and its successors: `starting -> ready -> busy -> killed -> replaced`, which is starting again.

    Invariants:
    - At most one process can be called; it has a worker from its start until somebody discards it.
    - It is replaced when somebody needs it, once, however many wait for it; the successors of `maths` are `maths.1`, `maths.2`.
    - Discarding a worker that was discarded before changes nothing, so that everyone who saw it break may do so.
    """

    def __init__(
        self, name: str, spec: WorkerSpec, workers: Workers, open_args: Sequence[Any], opened: Opened, replaced: Replaced
    ) -> None:  # fmt: skip
        self._replaced = replaced
        self._lost: tuple[str, float] | None = None
        """Why and when the last worker was found broken; None where it was not."""
        self._name, self._spec, self._workers, self._open_args, self._opened = name, spec, workers, open_args, opened
        self.worker: Worker | None = None
        self.sessions = 0
        self.users: set[int] = set()
        """Numbers of all sessions that the present worker ever had."""
        self.width = 1
        self.places = asyncio.Semaphore(1)
        self._ends = False
        self._started = 0
        self._starting = asyncio.Lock()  # held across a start: those who come meanwhile want that process, not one each
        self._clearing = asyncio.Lock()
        self._requests: asyncio.Task[None] | None = None

    async def ready(self) -> Worker:
        """Return the process that can be called, started where there is none. Raises what its component's `open` raises."""
        async with self._starting:
            if self.worker is None:
                name = f"{self._name}.{self._started}" if self._started else self._name
                self._started += 1
                (worker,) = await self._workers.start([replace(self._spec, name=name)], START_S)
                try:
                    concurrent, self._ends, opened = await worker.call("start", *self._open_args, timeout_s=START_S)
                    handlers = self._opened(opened)
                except BaseException:
                    await worker.kill()
                    raise
                if concurrent and self.width == 1:
                    self.width, self.places = SIDE_BY_SIDE, asyncio.Semaphore(SIDE_BY_SIDE)
                self.worker, self.users = worker, set()
                if self._lost is not None:
                    (why, lost_at), self._lost = self._lost, None
                    await self._replaced(self._name, why, asyncio.get_running_loop().time() - lost_at)
                self._requests = asyncio.create_task(_answer_requests(worker, handlers)) if handlers else None
            return self.worker

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """Take all places: batches that are in the process leave it first, none enters."""
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
        """Kill a process that can't be trusted; return whether nobody had before. No `why`: it is not needed any more."""
        if self.worker is not worker:
            return False
        self.worker, requests = None, self._requests
        self._lost = (why, asyncio.get_running_loop().time()) if why else None
        await worker.kill()
        if requests is not None:
            requests.cancel()
            await asyncio.gather(requests, return_exceptions=True)
        return True

    async def end(self) -> None:
        """End the process, after what its component does at its end. The wait for that is bounded."""
        if (worker := self.worker) is not None:
            if self._ends:
                with suppress(DeadlineExceeded, WorkerDied):
                    await worker.call("finish", timeout_s=END_S)
            await self.discard(worker, "")


class IsolatedSession:
    """Calls to one process about one `number`: the state that they share is lost with the process, and never moved.

    Calls raise ItemTimeout or ItemCrash where the process broke and no other session was ever in it, else SessionLost.
    """

    def __init__(self, process: IsolatedProcess, worker: Worker, number: int, timeout_s: float) -> None:
        self.number = number
        self._process, self._worker, self._timeout_s = process, worker, timeout_s
        self._silence_s = timeout_s + GRACE_S
        self._users = process.users
        self._users.add(number)
        self._heard: deque[tuple[float, float]] = deque()
        """Heartbeats of a long call in the last `timeout_s`: when, and for how long the loop had stood still until then."""

    @property
    def alone(self) -> bool:
        """True while no other session has been in the process, so that whatever happens in it is this one's."""
        return len(self._users) == 1

    async def call(self, method: str, *args: Any) -> Any:
        """Call a public method of the host with the session's number; silence kills the process."""
        if self._process.worker is not self._worker:
            raise self._broken("process was replaced", suspect=False)
        left_s = self._silence_s - (asyncio.get_running_loop().time() - self._heard[-1][0] if self._heard else 0.0)
        try:
            return await self._worker.call(method, self.number, *args, timeout_s=max(left_s, HEARTBEAT_S))
        except (DeadlineExceeded, WorkerDied) as error:
            raise await self._lost(error) from error

    async def long_call(self, method: str, *args: Any) -> Any:
        """Call a coroutine method of the host that may take any time, as long as its event loop lives."""
        heartbeat_s = min(HEARTBEAT_S, self._timeout_s / 10)
        now = asyncio.get_running_loop().time
        stream: Any = self._worker.stream(
            "long_call", heartbeat_s, method, self.number, *args, timeout_s=self._silence_s
        )
        self._heard.append((now(), 0.0))
        results: Sequence[Any] = ()
        try:
            async with aclosing(stream) as parts:
                async for blocked_s, answer in parts:
                    results = answer
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
        """Tell for how long, of the last `timeout_s`, the process's event loop stood still in a long call that goes on."""
        if not self._heard:
            return 0.0
        (_, before), (heard_at, blocked_s) = self._heard[0], self._heard[-1]
        silent_s = asyncio.get_running_loop().time() - heard_at - 2 * min(HEARTBEAT_S, self._timeout_s / 10)
        return blocked_s - before + max(silent_s, 0.0)

    async def discard(self) -> None:
        """Kill a process that can't be trusted, with the state of all its sessions."""
        await self._process.discard(self._worker, "its memory was used up")

    async def _lost(self, error: Exception) -> Exception:
        await self._process.discard(self._worker, str(error))
        if isinstance(error, DeadlineExceeded) and self.alone:
            return ItemTimeout()
        return self._broken(f"process ended: {error}", suspect=True)

    def _broken(self, message: str, suspect: bool) -> Exception:
        return ItemCrash(message) if self.alone else SessionLost(f"{message}; other samples were in it", suspect)


async def _answer_requests(worker: Worker, handlers: Mapping[str, Handler]) -> None:
    """Answer a child's calls until it ends; it takes its unanswered calls with it."""
    answers: set[asyncio.Task[None]] = set()
    stream: Any = worker.stream("requests", timeout_s=UNBOUNDED_S)
    try:
        with suppress(WorkerDied, DeadlineExceeded):
            async with aclosing(stream) as parts:
                async for requests in parts:
                    for request in requests:
                        answer = asyncio.create_task(_answer(worker, handlers, *request))
                        answers.add(answer)
                        answer.add_done_callback(answers.discard)
    finally:
        left = tuple(answers)
        for answer in left:
            answer.cancel()
        await asyncio.gather(*left, return_exceptions=True)


async def _answer(worker: Worker, handlers: Mapping[str, Handler], number: int, method: str, packed: bytes) -> None:
    """Answer one call, with an error where that is what came of it; the child hears meanwhile that it is worked on."""

    async def work() -> Any:
        if method not in handlers:
            raise ConfigError("call to the parent", repr(method), f"it has {', '.join(handlers)}")
        answer = handlers[method](*messages.decode(packed))
        return await answer if inspect.isawaitable(answer) else answer

    working = asyncio.ensure_future(work())
    try:
        while not (await asyncio.wait({working}, timeout=STILL_WORKING_S if number else None))[0]:
            with suppress(WorkerDied, DeadlineExceeded):
                await worker.call("still_working", number, timeout_s=ANSWER_S)
    finally:
        working.cancel()  # nobody waits for it any more
    if working.cancelled():
        failure: Failure | None = Failure("InfrastructureError", f"{method} was cancelled by the run")
    else:
        error = working.exception()
        failure = None if error is None else describe(error)
    if not number:
        return
    with suppress(WorkerDied, DeadlineExceeded):
        try:
            await worker.call("answered", number, failure, None if failure else working.result(), timeout_s=ANSWER_S)
        except (WorkerDied, DeadlineExceeded):
            raise
        except Exception as error:  # such as an answer that can't travel
            await worker.call("answered", number, describe(error), None, timeout_s=ANSWER_S)
