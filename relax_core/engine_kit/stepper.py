# SPDX-License-Identifier: Apache-2.0
"""Engines that are a library which takes steps: requests in, new tokens out of each step. For those who write engines.

`Stepper` is what the library's wrapper gives; `StepperThread` drives it, so that every token is told under the version that
sampled it. What an engine does for its callers is `stepped_engine`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from relax_core.api.engine import Delta, FinishReason, GenerateRequest
from relax_core.api.weights import Version
from relax_core.engine_kit.engine_thread import EngineThread, OpenRequest

if TYPE_CHECKING:
    import numpy as np


@dataclass(slots=True)
class StepOutput:
    """The tokens and facts that one step gave to one request."""

    tokens: tuple[int, ...]
    log_probs: tuple[float, ...]
    finish: FinishReason = ""
    error: str = ""
    top: tuple[tuple[tuple[int, float], ...], ...] = ()
    """The likeliest of each token, by rank; perhaps more than were asked for."""
    scores: tuple[float, ...] = ()
    """Of a sequence that was scored: the log-prob of each token but the first."""
    cached_tokens: int = 0
    """Of the prompt, found in caches of other requests; once it has finished."""
    routes: bytes = b""
    """Which experts its positions visited, from the first, as `Delta.routed_experts`; once it has finished, where asked."""


class Stepper(Protocol):
    """One model. Everything of it runs on one thread, the one that made it."""

    vocab_size: int
    max_context: int
    dtype: str
    """As torch calls it: float32."""
    model_type: str

    def add(self, request: GenerateRequest) -> None:
        """Queue a request."""
        ...

    def add_score(self, name: str, tokens: tuple[int, ...], temperature: float) -> None:
        """Queue a look at the log-probs of a sequence."""
        ...

    def abort(self, names: Sequence[str]) -> None:
        """Forget requests, if it has them; no later step tells of them, and their ids may come again."""
        ...

    def step(self) -> Mapping[str, StepOutput]:
        """One iteration; what it gave, by request."""
        ...

    def begun(self) -> Iterable[str]:
        """Requests of which something is computed already."""
        ...

    def routes(self, name: str) -> bytes:
        """As `StepOutput.routes`, of a request that asked for them and runs; empty where nothing is computed."""
        ...

    def load(self, arrays: Iterable[tuple[str, np.ndarray, str]]) -> None:
        """Replace weights by (name, array, dtype), Hugging Face names. Where it raises, the model is half of two."""
        ...

    def checksums(self) -> Mapping[str, str]:
        """Return checksums of the weights in memory, in the engine's own layout; empty where that can't be read."""
        ...

    def forget_caches(self, running: bool) -> None:
        """No later request meets keys and values of now; where `running`, those under way compute theirs again too."""
        ...

    def sleep(self, parts: frozenset[str]) -> int:
        """Free `weights` or `kv`; bytes really freed. Nothing is stepped meanwhile."""
        ...

    def wake(self, parts: frozenset[str]) -> None: ...

    def stop(self) -> None:
        """End what it started."""
        ...


@dataclass(slots=True)
class SteppedRequest(OpenRequest):
    """A request inside a stepper."""

    oldest: int = -1
    """The step whose weights its cache began under; -1: nothing is computed yet."""


class StepperThread(EngineThread[SteppedRequest]):
    """A stepper's requests, and the thread that steps it."""

    model: Stepper

    def __init__(self, make: Callable[[], Stepper], version: Version, keeps_caches: bool, name: str) -> None:
        super().__init__(version, name)
        self._make, self._keeps_caches = make, keeps_caches
        self._scoring: dict[str, Future[list[float]]] = {}
        self._numbers = 0
        self.prompt_tokens = self.cached_tokens = 0
        """Of requests that came to their ends: of their prompts, and of those found in caches."""

    def begin(self) -> Future[Stepper]:
        """Start; the model is made on the thread that it works on."""
        made = self.call(self._begin)
        self.start()
        return made

    # -- commands -------------------------------------------------------------------------------------------------

    def _begin(self) -> Stepper:
        self.model = self._make()
        return self.model

    def _enter(self, call: Sequence[SteppedRequest]) -> None:
        try:
            for member in call:
                self.model.add(member.request)
        except Exception:
            self.model.abort([member.request.id for member in call])
            raise

    def _abort(self, names: list[str]) -> None:
        routes = {name: self._routes(self._open[name]) for name in names}
        self.model.abort(names)
        for name in names:
            self._grown(name, StepOutput((), (), "abort", routes=routes[name]))

    def _routes(self, member: SteppedRequest) -> bytes:
        return self.model.routes(member.request.id) if member.request.routed_experts else b""

    def score(self, sequences: Sequence[tuple[int, ...]], temperature: float) -> list[Future[list[float]]]:
        answers: list[Future[list[float]]] = []
        for tokens in sequences:
            answers.append(Future())
            if len(tokens) < 2:
                answers[-1].set_result([0.0] * len(tokens))
                continue
            self._numbers += 1
            name = f"relax-score-{self._numbers}"
            self.model.add_score(name, tokens, temperature)
            self._scoring[name] = answers[-1]
        return answers

    def renew(self, version: Version) -> None:
        """The weights are of this version now: caches of others are dropped, or kept where asked and told."""
        keeps = self._keeps_caches and version.incarnation == self.version.incarnation
        if keeps:
            for name in self.model.begun():
                if name in self._open and self._open[name].oldest < 0:
                    self._open[name].oldest = self.version.step
        for name, member in self._open.items():
            if routes := self._routes(member):  # of the weights that sampled so far; computed again, they may differ
                self._grown(name, StepOutput((), (), routes=routes))
        self.model.forget_caches(running=not keeps)
        for member in self._open.values():
            if not keeps:
                member.oldest = -1
        self.version = version

    # -- the thread -----------------------------------------------------------------------------------------------

    def _idle(self) -> bool:
        return self._stopping or not (self._scoring or not super()._idle())

    def _iterate(self) -> None:
        for name, new in self.model.step().items():
            if name in self._scoring:
                self._scored(self._scoring.pop(name), new)
            elif name in self._open:
                self._grown(name, new)

    def _scored(self, answer: Future[list[float]], new: StepOutput) -> None:
        if new.finish == "error":
            answer.set_exception(ValueError(new.error))
        else:
            answer.set_result([0.0, *new.scores])

    def _grown(self, name: str, new: StepOutput) -> None:
        member, step = self._open[name], self.version.step
        if new.finish in ("stop", "length"):
            self.prompt_tokens += len(member.request.tokens)
            self.cached_tokens += new.cached_tokens
        if member.oldest < 0 and new.tokens:
            member.oldest = step
        oldest = member.oldest if member.oldest >= 0 else step
        likeliest = tuple(pairs[: member.request.num_top] for pairs in new.top) if member.request.num_top else ()
        self._hold(
            member.stream,
            Delta(name, new.tokens, new.log_probs, step, oldest, new.finish, new.error, new.routes, top=likeliest),
        )

    def _close(self) -> None:
        for answer in self._scoring.values():
            answer.set_exception(self.gone())
        if hasattr(self, "model"):
            self.model.stop()
