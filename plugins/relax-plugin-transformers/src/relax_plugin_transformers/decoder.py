# SPDX-License-Identifier: Apache-2.0
"""The decoding thread: everything that touches the model runs here, between two iterations or as one.

Commands (submit, abort, swap weights, score, ...) are functions put into its queue; each runs when the current
iteration is over, so that weights change between tokens and never within one. It knows nothing of asyncio but
`Stream.post`, and nothing of transports.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import torch

from relax_core.api.delta_stream import Stream
from relax_core.api.engine import Delta, FinishReason
from relax_core.api.errors import InfrastructureError
from relax_core.api.version import Version
from relax_plugin_transformers.batch import Batch, Finished, Running
from relax_plugin_transformers.model import CausalModel, by_length
from relax_plugin_transformers.options import TransformersOptions

T = TypeVar("T")
_SEND_EVERY = 4
"""Iterations whose deltas cross to the event loop together: every crossing costs this thread the interpreter lock."""


class Decoder:
    """Waiting calls, running batches, and the thread that advances them."""

    def __init__(
        self, model: CausalModel, version: Version, options: TransformersOptions, *, rows: int, serial: bool,
        keeps_caches: bool = False,
    ) -> None:  # fmt: skip
        self.model = model
        self.version = version
        self.asleep: set[str] = set()
        self.paused = False
        self.failure = ""
        self._options = options
        self._max_rows = rows
        self._serial = serial
        """One call at a time, its batches never merged: the same calls give the same bits."""
        self._keeps_caches = keeps_caches
        """Running requests keep their cache over an update; a prompt is run again for every later request."""
        self._open: dict[str, Running] = {}
        """Every request that has not finished, wherever it is: waiting, in prefill or in a batch."""
        self._waiting: deque[deque[Running]] = deque()
        self._batches: list[Batch] = []
        self._held: Finished = []
        self._since_sent = 0
        self._commands: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._gate = threading.Lock()
        """Between asking whether the thread has ended and putting a command, it must not end."""
        self._ended = False
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="relax-decoder", daemon=True)

    # Called from the event loop.

    def start(self) -> None:
        self._thread.start()

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run a function between two iterations; its result or error is the future's."""
        future: Future[T] = Future()
        with self._gate:
            if self._ended:
                raise self._gone()
            self._commands.put((function, future))
        return future

    def _gone(self) -> InfrastructureError:
        return InfrastructureError(f"the engine has stopped ({self.failure or 'stopped'}); start another")

    def join(self, timeout_s: float) -> bool:
        """Whether the thread ended in time."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def running(self) -> int:
        return sum(map(len, self._batches))

    @property
    def waiting(self) -> int:
        return sum(map(len, tuple(self._waiting)))

    # Commands: run on the thread.

    def submit(self, call: list[Running]) -> None:
        for member in call:
            if member.request.id in self._open:
                raise ValueError(f"request {member.request.id!r} is already running; ids are unique")
        self._open.update((member.request.id, member) for member in call)
        self._waiting.append(deque(call))

    def abort(self, ids: frozenset[str]) -> None:
        """End these requests; all of them where `ids` is empty."""
        finished: Finished = []
        for call in self._waiting:
            gone = [member for member in call if not ids or member.request.id in ids]
            finished += [(member, self._unstarted(member)) for member in gone]
            kept = [member for member in call if ids and member.request.id not in ids]
            call.clear()
            call.extend(kept)
        for batch in self._batches:
            rows = [row for row, member in enumerate(batch.members) if not ids or member.request.id in ids]
            if rows:
                finished += batch.take(rows, "abort", self.version.step)
        self._hold(finished)
        self._forget_empty()
        self._send()

    def withdraw(self, stream: Stream) -> None:
        """Abort what one call still has open; another call's request of the same id is not its own."""
        ids = frozenset(name for name, member in self._open.items() if member.stream is stream)
        if ids:
            self.abort(ids)

    def stop(self) -> None:
        self.abort(frozenset())
        self._stopping = True

    def fail(self, why: str) -> None:
        """Nothing may be sampled any more: end, and tell everyone."""
        self.failure = why
        self._stopping = True

    def flush(self) -> None:
        """Send what was sampled so far: a delta never spans two versions."""
        for batch in self._batches:
            self._hold(batch.flush(self.version.step))

    def renew(self, version: Version) -> None:
        """The weights are of this version from the next token on; caches of weights that were given up never stay."""
        keeps = self._keeps_caches and version.incarnation == self.version.incarnation
        for batch in self._batches:
            if keeps:
                batch.outlive(self.version.step)
            else:
                batch.drop_cache()
        self.version = version

    def drop_caches(self) -> int:
        return sum(batch.drop_cache() for batch in self._batches)

    def _unstarted(self, member: Running, finish: FinishReason = "abort") -> Delta:
        return Delta(member.request.id, (), (), self.version.step, self.version.step, finish)

    # The thread.

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                while not self._stopping:
                    self._obey()
                    if not self._idle():
                        self._iterate()
        except Exception as error:  # the thread's end is told to everyone who waits on it
            self.failure = f"{type(error).__name__}: {error}"
        finally:
            self._end()

    def _idle(self) -> bool:
        return self._stopping or self.paused or bool(self.asleep) or not (self._waiting or self._batches)

    def _obey(self) -> None:
        """Run what is queued; with nothing to decode, wait until a command comes: stopping is one."""
        if self._idle():
            self.flush()
            self._send()
            _answer(*self._commands.get())
        while not self._commands.empty():
            _answer(*self._commands.get())

    def _end(self) -> None:
        self._send()
        with self._gate:
            self._ended = True
        self.failure = self.failure or "stopped"
        for stream in {id(member.stream): member.stream for member in self._open.values()}.values():
            stream.post(self._gone())
        while not self._commands.empty():
            self._commands.get()[1].set_exception(self._gone())
        self._open.clear()
        self._waiting.clear()
        self._batches.clear()

    def _iterate(self) -> None:
        self._admit()
        for batch in self._batches:
            if batch.full:
                self._hold(batch.flush(self.version.step))
            batch.step(self.model)
            self._hold(batch.take_finished(self.version.step))
        self._forget_empty()
        self._since_sent += 1
        if self._since_sent >= _SEND_EVERY or not self._batches:
            self._send()

    def _admit(self) -> None:
        if self._waiting and not (self._serial and self._batches):
            for members in by_prompt_length(self._take_fitting(), self._options.max_prefill_tokens):
                batch = Batch.prefill(members, self.model, self._options.deltas_every)
                self._hold(batch.take_finished(self.version.step))
                if len(batch):
                    self._place(batch)

    def _take_fitting(self) -> list[Running]:
        """Whoever waits longest, while there is room; one request always fits an empty engine."""
        rows = self._max_rows - self.running
        slots = self._options.max_batch_tokens - sum(batch.slots for batch in self._batches)
        taken: list[Running] = []
        while self._waiting:
            call = self._waiting[0]
            while call and (not (taken or self._batches) or (rows > 0 and call[0].slots <= slots)):
                taken.append(call.popleft())
                rows, slots = rows - 1, slots - taken[-1].slots
            if call or (self._serial and taken):
                break
            self._waiting.popleft()
        return taken

    def _place(self, batch: Batch) -> None:
        for running in self._batches:
            if not self._serial and running.has_cache and running.cheap_to_merge(batch):
                running.merge(batch)
                return
        self._batches.append(batch)

    def _forget_empty(self) -> None:
        self._batches = [batch for batch in self._batches if len(batch)]
        self._waiting = deque(call for call in self._waiting if call)

    def _hold(self, deltas: Finished) -> None:
        self._held += deltas
        for _, delta in deltas:
            if delta.finish:
                del self._open[delta.id]

    def _send(self) -> None:
        by_stream: dict[int, tuple[Stream, list[Delta]]] = {}
        for member, delta in self._held:
            by_stream.setdefault(id(member.stream), (member.stream, []))[1].append(delta)
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


def by_prompt_length(members: Sequence[Running], budget: int) -> list[list[Running]]:
    """Members in prefill passes: all samples of a prompt together, prompts beside others of like length."""
    by_prompt: dict[tuple[int, ...], list[Running]] = {}
    for member in members:
        by_prompt.setdefault(member.request.tokens, []).append(member)
    prompts = sorted(by_prompt, key=len)
    chunks = by_length(range(len(prompts)), [len(prompt) for prompt in prompts], budget)
    return [[member for i in chunk for member in by_prompt[prompts[i]]] for chunk in chunks]
