# SPDX-License-Identifier: Apache-2.0
"""The thread that owns an engine's model. For engine authors.

The thread advances requests and runs commands between iterations. Commands (submit, abort, replace weights, ...) are
functions in the thread's queue, so that weights change only between tokens. Subclasses implement `_enter`, `_iterate`,
`_abort` and `renew`.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import traceback
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from relax_core.api.engine import Delta, GenerateRequest
from relax_core.api.errors import InfrastructureError
from relax_core.api.weights import Version

if TYPE_CHECKING:
    from relax_core.engine_kit.profiling import StepProfile


class DeltaStream:
    """The deltas of one `generate` call, passed in order from the engine's thread to the event loop."""

    def __init__(self, ids: Iterable[str]) -> None:
        self._loop = asyncio.get_running_loop()
        self._items: asyncio.Queue[Sequence[Delta] | Exception] = asyncio.Queue()
        self.unfinished = set(ids)

    def post(self, item: Sequence[Delta] | Exception) -> None:
        """Pass deltas, or the thread's failure, to the event loop; called on the engine's thread."""
        # The loop may already be closed; then no caller waits.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._items.put_nowait, item)

    async def items(self) -> AsyncIterator[Sequence[Delta]]:
        """Yield deltas until every request has finished; deltas that have arrived together are one item."""
        while self.unfinished:
            # No deadline here: the thread posts deltas or its failure, and callers detect a silent engine.
            waiting = [await self._items.get()]
            while not self._items.empty():
                waiting.append(self._items.get_nowait())
            deltas = [delta for item in waiting if not isinstance(item, Exception) for delta in item]
            self.unfinished -= {delta.id for delta in deltas if delta.finish}
            if deltas:
                yield deltas
            if isinstance(waiting[-1], Exception):
                raise waiting[-1]


T = TypeVar("T")
_SEND_EVERY = 4
"""Iterations between two transfers of deltas to the event loop, because a transfer takes the interpreter lock."""


@dataclass(slots=True)
class OpenRequest:
    """A request that has not finished, and its progress since its last delta, for engines that count it here."""

    request: GenerateRequest
    stream: DeltaStream
    """The stream of the caller."""
    oldest: int = -1
    """Oldest weight step in the request's KV cache; -1: nothing is computed yet."""
    tokens: list[int] = field(default_factory=list)
    """Tokens since the last delta, all of one version, as are `log_probs` and `top`."""
    log_probs: list[float] = field(default_factory=list)
    top: list[tuple[tuple[int, float], ...]] = field(default_factory=list)


class EngineThread(ABC):
    """The open requests of an engine, and the thread that advances them.

    Invariants:
    - Only the thread accesses requests, caches and weights, and commands run between two iterations.
    - All tokens of a delta are of one version of the weights; the last delta of a request has its finish reason.
    - After a failure nothing is sampled, and every waiting call raises.
    """

    def __init__(self, version: Version, name: str) -> None:
        self.version = version
        self.offloaded: set[str] = set()
        self.paused = False
        self.failure = ""
        self._open: dict[str, OpenRequest] = {}
        """Requests that have not finished, by id."""
        self._held: list[tuple[DeltaStream, Delta]] = []
        self._since_sent = 0
        self._commands: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._gate = threading.Lock()
        """Lock held while a caller checks that the thread is alive and queues a command, so that no command is lost."""
        self._ended = self._stopping = False
        self._profile: tuple[StepProfile, str, int] | None = None
        """The open profile, the path of its files, and the largest trace in bytes."""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    # -- called from the event loop -------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Queue a function to run between two iterations; the future gets its result or error."""
        future: Future[T] = Future()
        with self._gate:
            if self._ended:
                raise self.gone()
            self._commands.put((function, future))
        return future

    async def ask(self, function: Callable[[], T], needs: str = "") -> T:
        """Run a function between two iterations and wait for its result.

        Raises ValueError if the part `needs` (`weights`, `kv`) is offloaded.
        """

        def guarded() -> T:
            if needs in self.offloaded:
                raise ValueError(f"{self._thread.name}: {needs} are offloaded; onload them first")
            return function()

        return await asyncio.wrap_future(self.call(guarded))

    def gone(self) -> InfrastructureError:
        return InfrastructureError(f"the engine has stopped ({self.failure or 'stopped'}); start a new one")

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread to end; return False if the thread still runs after `timeout_s`."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def running(self) -> int:
        """Number of requests that are being computed; all open requests if the engine has no queue of its own."""
        return len(self._open)

    @property
    def waiting(self) -> int:
        """Number of open requests of which nothing is computed yet; 0 if the engine has no queue of its own."""
        return 0

    # -- profiles: run on the thread -------------------------------------------------------------------------------

    def begin_profile(self, path: str, max_bytes: int) -> None:
        from relax_core.engine_kit.profiling import StepProfile

        self.end_profile()
        self._profile = StepProfile(), path, max_bytes

    def end_profile(self) -> None:
        """Write the open profile, if any. A failure is written to the engine's log, and samples continue."""
        if self._profile is not None:
            (profile, path, max_bytes), self._profile = self._profile, None
            try:
                profile.write(path, max_bytes)
            except Exception:
                traceback.print_exc()

    # -- commands: run on the thread ------------------------------------------------------------------------------

    def submit(self, requests: Sequence[GenerateRequest], stream: DeltaStream) -> None:
        """Accept the requests of one call, all or none."""
        for request in requests:
            if request.id in self._open:
                raise ValueError(f"request {request.id!r} is already running; ids must be unique")
        call = [OpenRequest(request, stream) for request in requests]
        self._open.update((member.request.id, member) for member in call)
        try:
            self._enter(call)
        except Exception:
            for member in call:
                self._open.pop(member.request.id, None)
            raise

    def abort(self, ids: frozenset[str]) -> None:
        """Abort the requests with these ids; all requests if `ids` is empty."""
        self._end_requests([name for name in self._open if not ids or name in ids])

    def withdraw(self, stream: DeltaStream) -> None:
        """Abort the open requests of one call, but not a later call's request with the same id."""
        self._end_requests([name for name, member in self._open.items() if member.stream is stream])

    def _end_requests(self, names: list[str]) -> None:
        if names:
            self._abort(names)
        self._send()

    def stop(self) -> None:
        self.abort(frozenset())
        self._stopping = True

    def fail(self, why: str) -> None:
        """End the thread with a failure, which every waiting call raises; nothing may be sampled any more."""
        self.failure = why
        self._stopping = True

    # -- what an engine does --------------------------------------------------------------------------------------

    @abstractmethod
    def renew(self, version: Version) -> None:
        """Label all later tokens with `version`, after its weights were loaded; drop or keep KV caches."""

    def flush(self) -> None:
        """Pass all remaining sampled tokens to `_hold`; called before weights change and before the thread waits."""

    @abstractmethod
    def _enter(self, call: Sequence[OpenRequest]) -> None:
        """Accept all requests of one call, or raise and accept none."""

    @abstractmethod
    def _iterate(self) -> None:
        """Advance the requests by about one token, and pass the deltas to `_hold`."""

    @abstractmethod
    def _abort(self, names: list[str]) -> None:
        """End these open requests, and pass a delta with finish `abort` for each to `_hold`."""

    def _idle(self) -> bool:
        """Return True if there is nothing to do until a command arrives."""
        return self._stopping or self.paused or bool(self.offloaded) or not self._open

    def _close(self) -> None:
        """Free the thread's resources; called on the thread when it ends."""

    def _hold(self, stream: DeltaStream, delta: Delta) -> None:
        """Keep a delta until the next transfer to the event loop."""
        self._held.append((stream, delta))
        if delta.finish:
            del self._open[delta.id]

    # -- the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping:
                if self._idle():  # wait for a command, such as stop
                    self.flush()
                    self._send()
                    _answer(*self._commands.get())
                while not self._commands.empty():
                    _answer(*self._commands.get())
                if not self._idle():
                    self._iterate()
                    self._since_sent += 1
                    if self._since_sent >= _SEND_EVERY or not self._open:
                        self._send()
        except Exception as error:  # every waiting call raises this failure
            self.failure = f"{type(error).__name__}: {error}"
        finally:
            self._send()
            with self._gate:
                self._ended = True
            self.failure = self.failure or "stopped"
            for stream in {id(member.stream): member.stream for member in self._open.values()}.values():
                stream.post(self.gone())
            while not self._commands.empty():
                self._commands.get()[1].set_exception(self.gone())
            self.end_profile()
            self._close()
            self._open.clear()

    def _send(self) -> None:
        by_stream: dict[int, tuple[DeltaStream, list[Delta]]] = {}
        for stream, delta in self._held:
            by_stream.setdefault(id(stream), (stream, []))[1].append(delta)
        for stream, deltas in by_stream.values():
            stream.post(deltas)
        self._held, self._since_sent = [], 0


def _answer(function: Callable[[], Any], future: Future[Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function())
    except Exception as error:  # the future's waiter raises it
        future.set_exception(error)
