# SPDX-License-Identifier: Apache-2.0
"""The thread that owns a model: it advances requests, and runs commands between two iterations. For authors of engines.

Commands (submit, abort, replace weights, ...) are functions put into its queue, so that weights change between tokens and
never within one. Extend it by `_enter`, `_iterate`, `_abort` and `renew`.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from relax_core.api.engine import Delta, GenerateRequest
from relax_core.api.errors import InfrastructureError
from relax_core.api.weights import Version


class DeltaStream:
    """The deltas that one `generate` call waits for; they cross from the engine's thread to the event loop in order."""

    def __init__(self, ids: Iterable[str]) -> None:
        self._loop = asyncio.get_running_loop()
        self._items: asyncio.Queue[Sequence[Delta] | Exception] = asyncio.Queue()
        self.unfinished = set(ids)

    def post(self, item: Sequence[Delta] | Exception) -> None:
        """Hand deltas, or the thread's failure, to the event loop; called on the engine's thread."""
        # The loop may close at any moment; then nobody is left to tell.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._items.put_nowait, item)

    async def items(self) -> AsyncIterator[Sequence[Delta]]:
        """Yield deltas until every request has finished; all that have come by now at once."""
        while self.unfinished:
            # The engine's thread posts deltas or its own failure; callers bound the silence.
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
"""Iterations whose deltas cross to the event loop together: every crossing costs this thread the interpreter lock."""


@dataclass(slots=True)
class OpenRequest:
    """A request that has not finished, and who waits for it."""

    request: GenerateRequest
    stream: DeltaStream


OpenRequestT = TypeVar("OpenRequestT", bound=OpenRequest)


class EngineThread(ABC, Generic[OpenRequestT]):
    """Requests by id, and the thread that advances them.

    Invariants:
    - Requests, caches and weights are touched on the thread only, and commands run between two iterations.
    - A delta holds tokens of one version of the weights; every request ends with one delta that says how.
    - After a failure nothing is sampled, and whoever waits is told.
    """

    request_type: type[OpenRequestT]

    def __init__(self, version: Version, name: str) -> None:
        self.version = version
        self.asleep: set[str] = set()
        self.paused = False
        self.failure = ""
        self._open: dict[str, OpenRequestT] = {}
        """Every request that has not finished, wherever it is."""
        self._held: list[tuple[DeltaStream, Delta]] = []
        self._since_sent = 0
        self._commands: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._gate = threading.Lock()
        """Held between asking whether the thread has ended and putting a command: it must not end meanwhile."""
        self._ended = self._stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    # -- called from the event loop -------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run a function between two iterations; its result or error is the future's."""
        future: Future[T] = Future()
        with self._gate:
            if self._ended:
                raise self.gone()
            self._commands.put((function, future))
        return future

    async def ask(self, function: Callable[[], T], needs: str = "") -> T:
        """Run a function between two iterations and wait for it; ValueError where a part that it needs sleeps."""

        def guarded() -> T:
            if needs in self.asleep:
                raise ValueError(f"{self._thread.name}: {needs} asleep; wake them first")
            return function()

        return await asyncio.wrap_future(self.call(guarded))

    def gone(self) -> InfrastructureError:
        return InfrastructureError(f"the engine has stopped ({self.failure or 'stopped'}); start another")

    def join(self, timeout_s: float) -> bool:
        """Return whether the thread ended in time."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def running(self) -> int:
        """Requests that are advanced, or wherever else they are where an engine does not tell."""
        return len(self._open)

    @property
    def waiting(self) -> int:
        """Requests of which nothing is computed, where an engine tells them from the others."""
        return 0

    def facts(self) -> Mapping[str, Any]:
        """Return what else the engine's health tells."""
        return {}

    # -- commands: run on the thread ------------------------------------------------------------------------------

    def submit(self, requests: Sequence[GenerateRequest], stream: DeltaStream) -> None:
        """Take up the requests of one call, all or none."""
        for request in requests:
            if request.id in self._open:
                raise ValueError(f"request {request.id!r} is already running; ids are unique")
        call = [self.request_type(request, stream) for request in requests]
        self._open.update((member.request.id, member) for member in call)
        try:
            self._enter(call)
        except Exception:
            for member in call:
                self._open.pop(member.request.id, None)
            raise

    def abort(self, ids: frozenset[str]) -> None:
        """End these requests; all of them where `ids` is empty."""
        self._end_requests([name for name in self._open if not ids or name in ids])

    def withdraw(self, stream: DeltaStream) -> None:
        """Abort what one call still has open; another call's request of the same id is not its own."""
        self._end_requests([name for name, member in self._open.items() if member.stream is stream])

    def _end_requests(self, names: list[str]) -> None:
        if names:
            self._abort(names)
        self._send()

    def stop(self) -> None:
        self.abort(frozenset())
        self._stopping = True

    def fail(self, why: str) -> None:
        """End, and tell everyone: nothing may be sampled any more."""
        self.failure = why
        self._stopping = True

    # -- what an engine does --------------------------------------------------------------------------------------

    @abstractmethod
    def renew(self, version: Version) -> None:
        """Sample the next token under this version, whose weights were loaded; drop caches, or keep them where asked."""

    def flush(self) -> None:
        """`_hold` what was sampled and not yet told: called before weights change and before the thread waits."""

    @abstractmethod
    def _enter(self, call: Sequence[OpenRequestT]) -> None:
        """Take up requests, all of one call, or raise and have none of them."""

    @abstractmethod
    def _iterate(self) -> None:
        """Advance by a token or so, and `_hold` what came of it."""

    @abstractmethod
    def _abort(self, names: list[str]) -> None:
        """End these open requests, and `_hold` a delta that says so for each."""

    def _idle(self) -> bool:
        """Tell whether there is nothing to do until a command comes."""
        return self._stopping or self.paused or bool(self.asleep) or not self._open

    def _close(self) -> None:
        """Free what the thread held; called on the thread when it ends."""

    def _hold(self, stream: DeltaStream, delta: Delta) -> None:
        """Keep a delta until the next crossing to the event loop."""
        self._held.append((stream, delta))
        if delta.finish:
            del self._open[delta.id]

    # -- the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping:
                if self._idle():  # wait until a command comes: stopping is one
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
        except Exception as error:  # the thread's end is told to everyone who waits on it
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
    except Exception as error:  # handed to whoever waits on the future
        future.set_exception(error)
