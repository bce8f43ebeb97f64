# SPDX-License-Identifier: Apache-2.0
"""The engine around a library that takes steps: requests in, new tokens out of each step. For authors of engines.

`Stepper` is what the library's wrapper gives; `StepperThread` steps it, so that every token is told under the version that
sampled it; `SteppedEngine` is the engine. It proves the bytes that arrived and, where the stepper can read its memory, a
checksum of that. Extend it by `prepare` and `make`.
"""

from __future__ import annotations

import asyncio
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from hashlib import sha256
from math import prod
from typing import TYPE_CHECKING, Any, Generic, Protocol

from relax_core.api.component import OptionsT
from relax_core.api.engine import Delta, EngineSpec, FinishReason, GenerateRequest
from relax_core.api.weights import Manifest, Resident, Version, combined_fingerprint
from relax_core.engine_kit.engine_thread import EngineThread, OpenRequest
from relax_core.engine_kit.model_weights import StagedAdapter, folder_in_dtype, folder_tensors
from relax_core.engine_kit.threaded_engine import Arriving, ThreadedEngine
from relax_core.tensor_files.delta import DeltaBase

if TYPE_CHECKING:
    import numpy as np

_SAFETENSORS = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "float64": "F64"}


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
    """Log-probs of a sequence that was scored, of each token but the first."""
    cached_tokens: int = 0
    """Tokens of the prompt that were found in caches of other requests; told once it has finished."""
    routes: bytes = b""
    """Experts that its positions visited, from the first, as `Delta.routed_experts`; told once it has finished, where asked."""


class Stepper(Protocol):
    """One model of a library; everything of it runs on one thread, the one that made it."""

    vocab_size: int
    max_context: int
    dtype: str
    """By torch's name, such as float32."""
    model_type: str
    kv_tokens: int
    """Tokens that its KV cache holds, 0 where that is not known."""

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
        """Run one iteration and return what it gave, by request."""
        ...

    def begun(self) -> Iterable[str]:
        """Return the requests of which something is computed already."""
        ...

    def routes(self, name: str) -> bytes:
        """Return `StepOutput.routes` of a request that asked for them and runs; empty where nothing is computed."""
        ...

    def load(self, arrays: Iterable[tuple[str, np.ndarray, str]]) -> None:
        """Replace weights by (name, array, dtype), Hugging Face names. Where it raises, the model is half of two."""
        ...

    def checksums(self) -> Mapping[str, str]:
        """Return checksums of the weights in memory, in the engine's own layout; empty where that can't be read."""
        ...

    def forget_caches(self, running: bool) -> None:
        """Drop keys and values, so that no later request meets them; where `running`, those under way compute theirs again."""
        ...

    def sleep(self, parts: frozenset[str]) -> int:
        """Free `weights` or `kv` and return the bytes really freed. Nothing is stepped meanwhile."""
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
    request_type = SteppedRequest

    def __init__(self, make: Callable[[], Stepper], version: Version, keeps_caches: bool, name: str) -> None:
        super().__init__(version, name)
        self._make, self._keeps_caches = make, keeps_caches
        self._scoring: dict[str, Future[list[float]]] = {}
        self._numbers = 0
        self.prompt_tokens = self.cached_tokens = 0
        """Tokens of the prompts of requests that came to their ends, and how many of them were found in caches."""

    def facts(self) -> Mapping[str, Any]:
        return {"prompt_tokens": self.prompt_tokens, "cached_tokens": self.cached_tokens}

    def begin(self) -> Future[Stepper]:
        """Start; the model is made on the thread that it works on."""

        def make() -> Stepper:
            self.model = self._make()
            return self.model

        made = self.call(make)
        self.start()
        return made

    # -- commands -------------------------------------------------------------------------------------------------

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
        """Sample under this version from now on: caches of others are dropped, or kept where asked and told."""
        keeps = self._keeps_caches and version.incarnation == self.version.incarnation
        if keeps:
            for name in self.model.begun():
                if name in self._open and self._open[name].oldest < 0:
                    self._open[name].oldest = self.version.step
        for name, member in self._open.items():
            if routes := self._routes(member):  # of the weights that sampled so far; computed again, they may differ
                self._grown(name, StepOutput((), (), routes=routes))
        self.model.forget_caches(running=not keeps)
        if not keeps:
            for member in self._open.values():
                member.oldest = -1
        self.version = version

    # -- the thread -----------------------------------------------------------------------------------------------

    def _idle(self) -> bool:
        return self._stopping or not (self._scoring or not super()._idle())

    def _iterate(self) -> None:
        for name, new in self.model.step().items():
            if name in self._open:
                self._grown(name, new)
            elif name in self._scoring:
                answer = self._scoring.pop(name)
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


class SteppedEngine(ThreadedEngine[StepperThread, OptionsT], Generic[OptionsT]):
    """One stepper in this process, which is given whole versions: deltas and adapters are laid over the model folder."""

    scoring_samples = True

    @abstractmethod
    def prepare(self) -> Mapping[str, Any]:
        """Prepare the engine's process before anything heavy is imported; return facts. ConfigError where it can't run."""

    @abstractmethod
    def make(self, spec: EngineSpec) -> Stepper:
        """Load the library and its model; called on the thread that steps it."""

    async def start(self, spec: EngineSpec) -> Mapping[str, Any]:
        began = time.monotonic()
        facts = self.prepare()
        self._spec, path = spec, str(spec.model["path"])
        self._known = await asyncio.to_thread(folder_tensors, path)
        name = f"relax-{type(self).__name__.removesuffix('Engine').lower()}"
        self._thread = StepperThread(lambda: self.make(spec), spec.version, spec.kv_across_versions, name)
        model = await asyncio.wrap_future(self._thread.begin())
        self._vocab_size, self._max_context = model.vocab_size, model.max_context
        self._dtype = _SAFETENSORS.get(model.dtype, model.dtype)
        self._kept: DeltaBase | None = None
        if self.capabilities.lora and spec.model.get("lora"):
            same = all(info.dtype == self._dtype for info in self._known.values())
            base = self._known if same else await asyncio.to_thread(folder_tensors, path, self._dtype)
            self._base = combined_fingerprint(base.values())
        if self._takes_deltas():
            held = {name: array for name, array, _ in await asyncio.to_thread(list, folder_in_dtype(path, self._dtype))}
            self._kept = DeltaBase(spec.version, lambda: held)
        return {
            "vocab_size": model.vocab_size,
            "max_context": model.max_context,
            "kv_tokens": model.kv_tokens,
            "fingerprint": combined_fingerprint(self._known.values()),
            "parameters": sum(prod(info.shape) for info in self._known.values()),
            "model_type": model.model_type,
            "dtype": model.dtype,
            "load_seconds": time.monotonic() - began,
            **facts,
        }

    async def _score(
        self, thread: StepperThread, sequences: Sequence[Sequence[int]], temperature: float
    ) -> Sequence[Sequence[float]]:
        answers = await thread.ask(lambda: thread.score([tuple(s) for s in sequences], temperature), needs="weights")
        return await asyncio.gather(*map(asyncio.wrap_future, answers))

    def _delta_base(self) -> Resident | None:
        return self._kept.value if self._kept else None

    def _load(self, thread: StepperThread, manifest: Manifest, staged: Arriving | StagedAdapter) -> None:
        if isinstance(staged, StagedAdapter):
            thread.model.load(staged.over_folder(str(self._spec.model["path"]), self._dtype))
        elif self._kept is None:
            thread.model.load((info.name, array, info.dtype) for info, array in staged)
        else:
            whole = self._kept.follow(manifest, staged)
            thread.model.load((info.name, array, info.dtype) for info, array, _ in whole)

    def _prove(self, thread: StepperThread, manifest: Manifest) -> str:
        checksums = thread.model.checksums()
        return sha256(repr(sorted(checksums.items())).encode()).hexdigest() if checksums else ""

    def _release(self, thread: StepperThread, parts: frozenset[str]) -> int:
        return thread.model.sleep(parts)

    def _restore(self, thread: StepperThread, parts: frozenset[str]) -> None:
        thread.model.wake(parts)
