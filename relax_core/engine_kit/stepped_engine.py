# SPDX-License-Identifier: Apache-2.0
"""An engine base for inference libraries that are driven step by step. For engine authors.

`Stepper` is the interface of the library's wrapper. `StepperThread` calls the stepper and labels every token with the
version that sampled the token. `SteppedEngine` is the engine: it proves the bytes that arrived, and a checksum of the
weights in memory if the stepper can read them. Subclasses implement `prepare` and `make`.
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
from typing import TYPE_CHECKING, Generic, Protocol

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
    """The result of one step for one request."""

    tokens: tuple[int, ...]
    log_probs: tuple[float, ...]
    finish: FinishReason = ""
    error: str = ""
    top: tuple[tuple[tuple[int, float], ...], ...] = ()
    """Most likely alternatives at each token as (token, log-prob), best first; may be more than `num_top`."""
    scores: tuple[float, ...] = ()
    """For a scored sequence: log-probs of each token except the first."""
    cached_tokens: int = 0
    """Prompt tokens found in the cache of an earlier request; set in the last output of a request."""
    drafts: tuple[int, int] | None = None
    """Numbers of drafted tokens, as in `Delta.drafts`; set in the last output of a request."""
    routed_experts: bytes = b""
    """Experts visited at each position from 0, as in `Delta.routed_experts`; in the last output, if requested."""


class Stepper(Protocol):
    """One model of an inference library; all calls are made on the thread that created it.

    Every wrapper implements `add`, `abort`, `step`, `load` and `stop`, and `forget_caches` if a request may use the cache of
    an earlier one. The other methods belong to capabilities; their defaults suit an engine that declares none.
    """

    vocab_size: int
    max_context: int
    dtype: str
    """Number format of the weights by torch's name, such as float32."""
    model_type: str
    kv_tokens: int = 0
    """Size of the KV cache in tokens; 0: unknown."""

    def add(self, request: GenerateRequest) -> None:
        """Queue a request."""
        ...

    def abort(self, names: Sequence[str]) -> None:
        """Drop requests, ignoring unknown names; later steps return nothing for them, and their ids may be reused."""
        ...

    def step(self) -> Mapping[str, StepOutput]:
        """Run one iteration and return its outputs by request."""
        ...

    def load(self, arrays: Iterable[tuple[str, np.ndarray, str]]) -> None:
        """Replace weights by (name, array, dtype), with Hugging Face names.

        All outputs of later steps must be of the new weights. If this raises, the model may hold a mix of two versions and
        must not be used.
        """
        ...

    def stop(self) -> None:
        """Stop everything that the stepper started."""
        ...

    def add_score(self, name: str, tokens: tuple[int, ...], temperature: float) -> None:
        """Queue a sequence to be scored; a later `step` returns its `StepOutput.scores` under `name`."""
        raise NotImplementedError

    def started(self) -> Iterable[str]:
        """Return the requests whose computation has started; needed to keep caches over an update."""
        return ()

    def routed_experts(self, name: str) -> bytes:
        """Return the experts of a running request so far, as in `StepOutput.routed_experts`; empty before its first step."""
        return b""

    def checksums(self) -> Mapping[str, str]:
        """Return checksums of the weights in memory, in the engine's own layout; empty if they cannot be read."""
        return {}

    def forget_caches(self, running: bool) -> None:
        """Drop prefix caches, so that no later request reuses them; if `running`, open requests recompute theirs."""
        return

    def offload(self, parts: frozenset[str]) -> int:
        """Free `weights` or `kv` and return the bytes freed. `step` is not called until `onload`."""
        raise NotImplementedError

    def onload(self, parts: frozenset[str]) -> None:
        """Load the parts that `offload` freed."""
        raise NotImplementedError


class StepperThread(EngineThread):
    """The thread that calls a stepper, with the stepper's open requests."""

    model: Stepper

    def __init__(self, make: Callable[[], Stepper], version: Version, keeps_caches: bool, name: str) -> None:
        super().__init__(version, name)
        self._make, self._keeps_caches = make, keeps_caches
        self._scoring: dict[str, Future[list[float]]] = {}
        self._numbers = 0

    def begin(self) -> Future[Stepper]:
        """Start the thread, which creates the model; the future gets the model."""

        def make() -> Stepper:
            self.model = self._make()
            return self.model

        made = self.call(make)
        self.start()
        return made

    # -- commands -------------------------------------------------------------------------------------------------

    def _enter(self, call: Sequence[OpenRequest]) -> None:
        try:
            for member in call:
                self.model.add(member.request)
        except Exception:
            self.model.abort([member.request.id for member in call])
            raise

    def _abort(self, names: list[str]) -> None:
        experts = {name: self._routed_experts(self._open[name]) for name in names}
        self.model.abort(names)
        for name in names:
            self._grown(name, StepOutput((), (), "abort", routed_experts=experts[name]))

    def _routed_experts(self, member: OpenRequest) -> bytes:
        return self.model.routed_experts(member.request.id) if member.request.routed_experts else b""

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
        """Label all later tokens with `version`; drop caches, or keep them within an incarnation if configured."""
        keeps = self._keeps_caches and version.incarnation == self.version.incarnation
        if keeps:
            for name in self.model.started():
                if name in self._open and self._open[name].oldest < 0:
                    self._open[name].oldest = self.version.step
        for name, member in self._open.items():
            if experts := self._routed_experts(
                member
            ):  # save the experts of the old weights: a recomputation may differ
                self._grown(name, StepOutput((), (), routed_experts=experts))
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
        member = self._open[name]
        member.tokens += new.tokens
        member.log_probs += new.log_probs
        if member.request.num_top:
            member.top += (pairs[: member.request.num_top] for pairs in new.top)
        if member.oldest < 0 and new.tokens:
            member.oldest = self.version.step
        if new.finish or new.routed_experts:
            self._pass(member, new)

    def _pass(self, member: OpenRequest, new: StepOutput) -> None:
        """Hold a delta with the tokens since the last one, and with all but the tokens of `new`."""
        step, request = self.version.step, member.request
        delta = Delta(
            request.id, tuple(member.tokens), tuple(member.log_probs), step,
            member.oldest if member.oldest >= 0 else step, new.finish, new.error, new.routed_experts, top=tuple(member.top),
            cached=(new.cached_tokens, len(request.tokens)) if new.finish in ("stop", "length") else None,
            drafts=new.drafts,
        )  # fmt: skip
        member.tokens, member.log_probs, member.top = [], [], []
        self._hold(member.stream, delta)

    def flush(self) -> None:
        for member in self._open.values():
            if member.tokens:
                self._pass(member, StepOutput((), ()))

    def _send(self) -> None:
        self.flush()
        super()._send()

    def _close(self) -> None:
        for answer in self._scoring.values():
            answer.set_exception(self.gone())
        if hasattr(self, "model"):
            self.model.stop()


class SteppedEngine(ThreadedEngine[StepperThread, OptionsT], Generic[OptionsT]):
    """An engine with one stepper. The engine applies deltas and adapters, so the stepper always loads whole models."""

    scoring_samples = True

    @abstractmethod
    def prepare(self) -> Mapping[str, object]:
        """Prepare the process before heavy imports; return facts. Raises ConfigError if the engine cannot run."""

    @abstractmethod
    def make(self, spec: EngineSpec) -> Stepper:
        """Import the library and load its model; called on the stepper's thread."""

    async def start(self, spec: EngineSpec) -> Mapping[str, object]:
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

    def _offload(self, thread: StepperThread, parts: frozenset[str]) -> int:
        return thread.model.offload(parts)

    def _onload(self, thread: StepperThread, parts: frozenset[str]) -> None:
        thread.model.onload(parts)
