# SPDX-License-Identifier: Apache-2.0
"""The driving thread: steps vLLM and runs commands between two steps. It knows nothing of asyncio but `Stream.post`.

Commands (submit, abort, replace weights, ...) are functions put into its queue, so that weights change between tokens and
never within one, and every token is told under the version that sampled it.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from relax_core.api.delta_stream import Stream
from relax_core.api.engine import Delta, FinishReason, GenerateRequest
from relax_core.api.errors import InfrastructureError
from relax_core.api.version import Version

if TYPE_CHECKING:
    from relax_plugin_vllm.model import New, Vllm

T = TypeVar("T")
SEND_EVERY = 4
"""Steps whose deltas cross to the event loop together."""


@dataclass(slots=True)
class Running:
    """A request that has not finished."""

    request: GenerateRequest
    stream: Stream
    oldest: int = -1
    """The step whose weights its cache began under; -1: nothing is computed yet."""


@dataclass(slots=True)
class Scoring:
    """A sequence whose log-probs somebody waits for."""

    tokens: tuple[int, ...]
    temperature: float
    answer: Future[list[float]]


class Driver:
    """Requests by id, and the thread that advances them."""

    def __init__(self, make: Callable[[], Vllm], version: Version, keeps_caches: bool) -> None:
        self._make, self.version, self._keeps_caches = make, version, keeps_caches
        self.paused = False
        self.asleep: set[str] = set()
        self.failure = ""
        self._open: dict[str, Running] = {}
        self._scoring: dict[str, Scoring] = {}
        self._held: list[tuple[Stream, Delta]] = []
        self._since_sent = self._numbers = 0
        self._commands: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._gate = threading.Lock()
        """Between asking whether the thread has ended and putting a command, it must not end."""
        self._ended = self._stopping = False
        self._thread = threading.Thread(target=self._run, name="relax-vllm", daemon=True)

    # -- called from the event loop -------------------------------------------------------------------------------

    def start(self) -> Future[Vllm]:
        """vLLM is made on the thread that it works on."""
        made = self.call(self._begin)
        self._thread.start()
        return made

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run a function between two steps; its result or error is the future's."""
        future: Future[T] = Future()
        with self._gate:
            if self._ended:
                raise self.gone()
            self._commands.put((function, future))
        return future

    def gone(self) -> InfrastructureError:
        return InfrastructureError(f"the engine has stopped ({self.failure or 'stopped'}); start another")

    def join(self, timeout_s: float) -> bool:
        """Whether the thread ended in time."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def open(self) -> int:
        return len(self._open)

    # -- commands -------------------------------------------------------------------------------------------------

    def _begin(self) -> Vllm:
        self.model = self._make()
        return self.model

    def submit(self, call: list[Running]) -> None:
        for member in call:
            if member.request.id in self._open:
                raise ValueError(f"request {member.request.id!r} is already running; ids are unique")
        for member in call:
            self.model.add(member.request)
            self._open[member.request.id] = member

    def score(self, sequences: list[tuple[int, ...]], temperature: float) -> list[Future[list[float]]]:
        answers: list[Future[list[float]]] = []
        for tokens in sequences:
            answers.append(Future())
            if len(tokens) < 2:
                answers[-1].set_result([0.0] * len(tokens))
                continue
            self._numbers += 1
            name = f"relax-score-{self._numbers}"
            self.model.add_score(name, tokens, temperature != 1.0)
            self._scoring[name] = Scoring(tokens, temperature, answers[-1])
        return answers

    def abort(self, ids: frozenset[str]) -> None:
        """End these requests; all of them where `ids` is empty."""
        self._abort([name for name in self._open if not ids or name in ids])

    def withdraw(self, stream: Stream) -> None:
        """Abort what one call still has open."""
        self._abort([name for name, member in self._open.items() if member.stream is stream])

    def _abort(self, names: list[str]) -> None:
        if names:
            self.model.abort(names)
        for name in names:
            self._hold(name, (), (), "abort")
        self._send()

    def renew(self, version: Version) -> None:
        """The weights are of this version now: caches of others are dropped, or kept where asked and told."""
        keeps = self._keeps_caches and version.incarnation == self.version.incarnation
        self.model.forget_caches(running=not keeps)
        for member in self._open.values():
            if not keeps:
                member.oldest = -1
        self.version = version

    def stop(self) -> None:
        self.abort(frozenset())
        self._stopping = True

    def fail(self, why: str) -> None:
        """Nothing may be sampled any more: end, and tell everyone."""
        self.failure = why
        self._stopping = True

    # -- the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._obey()
                if not self._idle():
                    self._iterate()
        except Exception as error:  # the thread's end is told to everyone who waits on it
            self.failure = f"{type(error).__name__}: {error}"
        finally:
            self._end()

    def _idle(self) -> bool:
        held = self.paused or bool(self.asleep)
        return self._stopping or not (self._scoring or (self._open and not held))

    def _obey(self) -> None:
        """Run what is queued; with nothing to do, wait until a command comes: stopping is one."""
        if self._idle():
            self._send()
            _answer(*self._commands.get())
        while not self._commands.empty():
            _answer(*self._commands.get())

    def _iterate(self) -> None:
        for name, new in self.model.step().items():
            if name in self._scoring:
                self._scored(name, new)
            elif name in self._open:
                self._grown(name, new)
        self._since_sent += 1
        if self._since_sent >= SEND_EVERY or not self._open:
            self._send()

    def _grown(self, name: str, new: New) -> None:
        self._hold(name, new.tokens, new.log_probs, new.finish, new.top)

    def _scored(self, name: str, new: New) -> None:
        scoring = self._scoring.pop(name)
        scoring.answer.set_result([0.0, *map(_tempered(scoring.temperature), new.prompt, scoring.tokens[1:])])

    def _hold(
        self, name: str, tokens: tuple[int, ...], log_probs: tuple[float, ...], finish: FinishReason,
        top: tuple[tuple[tuple[int, float], ...], ...] = (),
    ) -> None:  # fmt: skip
        member, step = self._open[name], self.version.step
        if member.oldest < 0 and tokens:
            member.oldest = step
        oldest = member.oldest if member.oldest >= 0 else step
        likeliest = tuple(pairs[: member.request.num_top] for pairs in top)
        delta = Delta(member.request.id, tokens, log_probs, step, oldest, finish, top=likeliest)
        self._held.append((member.stream, delta))
        if finish:
            del self._open[name]

    def _send(self) -> None:
        by_stream: dict[int, tuple[Stream, list[Delta]]] = {}
        for stream, delta in self._held:
            by_stream.setdefault(id(stream), (stream, []))[1].append(delta)
        for stream, deltas in by_stream.values():
            stream.post(deltas)
        self._held, self._since_sent = [], 0

    def _end(self) -> None:
        self._send()
        with self._gate:
            self._ended = True
        self.failure = self.failure or "stopped"
        for stream in {id(member.stream): member.stream for member in self._open.values()}.values():
            stream.post(self.gone())
        for scoring in self._scoring.values():
            scoring.answer.set_exception(self.gone())
        while not self._commands.empty():
            self._commands.get()[1].set_exception(self.gone())
        if hasattr(self, "model"):
            self.model.stop()
        self._open.clear()


def _tempered(temperature: float) -> Callable[[dict[int, float], int], float]:
    """Of log-probs at temperature 1 to those of logits / temperature: they are logits but for a constant."""
    if temperature == 1.0:
        return lambda row, token: row[token]

    def tempered(row: dict[int, float], token: int) -> float:
        from math import exp, log

        highest = max(row.values())
        total = sum(exp((value - highest) / temperature) for value in row.values())
        return (row[token] - highest) / temperature - log(total)

    return tempered


def _answer(function: Callable[[], Any], future: Future[Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function())
    except Exception as error:  # handed to whoever waits on the future
        future.set_exception(error)
