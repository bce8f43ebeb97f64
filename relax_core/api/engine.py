# SPDX-License-Identifier: Apache-2.0
"""Engines: token ids in; ids, log-probs and versions out. One instance a process, maybe in its own interpreter.

Text is never seen here: the core renders, tokenizes once and parses. `Capabilities` declare what an engine can do;
the planner refuses a configuration that needs more. A `ModelClient` asks a pool of engines beside the policy's: rewards
and environments name such pools in `needs_engines` and find their clients in `self.engines`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, Generic, Literal, Protocol, TypeAlias

from relax_core.api.component import Chosen, Configurable, OptionsT
from relax_core.api.plan import Estimate, Workload
from relax_core.api.task import Message
from relax_core.api.weights import Manifest, Receipt, ReceiptLevel, Version

FinishReason = Literal["", "stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The abilities of an engine, declared as a class attribute."""

    in_flight_updates: bool = False
    """New weights may land in the middle of a request."""
    keeps_kv_across_versions: bool = False
    seeds: bool = False
    """Same seed and tokens, same sample, whatever else is in the batch."""
    routed_experts: bool = False
    """Can tell which experts every position visited."""
    lora: bool = False
    delta: bool = False
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")
    """Number formats of weights that it computes in."""
    media: frozenset[str] = frozenset()
    score: bool = False
    sleep: frozenset[str] = frozenset()
    """Parts whose memory it gives back meanwhile: `weights`, `kv`."""
    sleeps_on_cpu: bool = True
    """False: only on GPUs."""
    receipts: ReceiptLevel = "wire"
    transports: frozenset[str] = frozenset({"shared-memory", "disk"})
    receives_online: bool = True
    """False: weights only at start."""


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """The settings that an engine is started with."""

    model: Mapping[str, Any]
    """The `[model]` table; its `dtype` is the engine's, which is also that of all that is published to it."""
    max_context: int
    """Prompt and completion together, in tokens."""
    seed: int = 0
    deterministic: bool = False
    version: Version = field(default_factory=lambda: Version("actor", 0, 0))
    """Of the weights in the model folder."""
    name: str = "engine-0"
    max_concurrency: int = 0
    """0: the engine's own choice."""
    kv_across_versions: bool = False
    """Requests in flight keep their KV cache over an update of the weights; shared prefix caches never do."""
    media: str = ""
    """Directory of the run's media store (`relax_core.media.store`); empty: the run has no media."""


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One continuation. Log-probs returned are of the distribution sampled from: logits / temperature, after top_p."""

    id: str
    tokens: tuple[int, ...]
    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    stop_tokens: tuple[int, ...] = ()
    suppress_tokens: tuple[int, ...] = ()
    media: tuple[str, ...] = ()
    """Keys of processed media, in order of their placeholders."""
    floor: int = -1
    """Oldest step among the group's tokens: the engine must be at or above it."""
    routed_experts: bool = False
    """Also return which experts every position visited (`Delta.routed_experts`)."""
    num_top: int = 0
    """Also return the k likeliest tokens."""


@dataclass(frozen=True, slots=True)
class Delta:
    """New tokens of one request since the last delta."""

    id: str
    tokens: tuple[int, ...]
    log_probs: tuple[float, ...]
    version: int
    """Step of the weights that sampled them. No request runs on while its engine takes weights of another incarnation, so
    that the step names them."""
    oldest_cache: int
    """Oldest step in the KV cache they attended to; equals `version` where caches are dropped."""
    finish: FinishReason = ""
    error: str = ""
    routed_experts: bytes = b""
    """[positions, layers, top_k], as `relax_core.api.family` says: of consecutive positions of the request's prompt with
    what was sampled behind it, as they were when the next token was drawn. Every position that was fed through the model
    has one by the last delta: all but the last token sampled. Those that an engine took from a cache and does not know
    may be missing; what comes twice counts as it came first."""
    routes_from: int = 0
    """The first of those positions."""
    top: tuple[tuple[tuple[int, float], ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Health:
    """An engine's word on itself."""

    ok: bool
    version: Version
    running: int = 0
    waiting: int = 0
    facts: Mapping[str, Any] = field(default_factory=dict)


class Engine(Configurable[OptionsT], Generic[OptionsT]):
    """An inference backend instance."""

    kind: ClassVar[str] = "engine"
    capabilities: ClassVar[Capabilities] = Capabilities()
    switches: ClassVar[Mapping[str, str]] = {}
    """Capabilities that cost something and are had only where an option is true: {"delta": "keep_weights"}."""

    def devices(self) -> int:
        """GPUs that one engine with these options works on, where it works on any; 0: as many as it is given."""
        return 0

    @abstractmethod
    async def start(self, spec: EngineSpec) -> Mapping[str, Any]:
        """Load the model; returns facts (vocab_size, max_context, fingerprint, parameters, ...). `kv_tokens` among them: tokens
        that its KV cache holds, where it is bounded."""

    @abstractmethod
    def generate(self, requests: Sequence[GenerateRequest]) -> AsyncIterator[Sequence[Delta]]:
        """Continue the requests; yields deltas of any of them until each has finished.

        Raises ValueError for an id outside the vocabulary or a request over the context, before anything runs.
        """

    async def score(self, sequences: Sequence[Sequence[int]], temperature: float = 1.0) -> Sequence[Sequence[float]]:
        """Log-prob of each token given those before it, of logits / temperature; the first is 0."""
        raise NotImplementedError

    @abstractmethod
    async def update_weights(self, manifest: Manifest, transport: Chosen) -> Receipt:
        """Load a version whole or not at all; the next token sampled is of this version."""

    async def pause(self) -> None:
        """Stop sampling after the current token; requests stay."""
        raise NotImplementedError

    async def resume(self) -> None:
        raise NotImplementedError

    async def abort(self, ids: Sequence[str]) -> None:
        """End requests now, paused or not, with finish `abort`; all of them when `ids` is empty."""
        raise NotImplementedError

    async def sleep(self, parts: Sequence[str]) -> int:
        """Free `weights` or `kv`; returns bytes really freed."""
        raise NotImplementedError

    async def wake(self, parts: Sequence[str]) -> None:
        raise NotImplementedError

    @abstractmethod
    async def health(self) -> Health: ...

    @abstractmethod
    async def stop(self) -> None:
        """End without orphans."""

    def estimate(self, spec: EngineSpec, work: Workload) -> Estimate:
        """Estimate the memory and work of one engine for its part of a step; called on an instance that was not
        started. Optional."""
        raise NotImplementedError

    def check(self, model: Mapping[str, Any]) -> Any:
        """Refuse at plan time what the options or the model can't do; raise ConfigError."""


def switched_off(engine: type[Engine], capability: str, options: Mapping[str, Any]) -> str:
    """The option that must be true for a capability that this engine claims; empty where it is, or none is needed."""
    switch = engine.switches.get(capability, "")
    return "" if options.get(switch) else switch


Prompt: TypeAlias = "str | Sequence[Message] | Sequence[int]"
"""Messages are rendered by the pool's chat template; text goes in as it stands; ids are the pool's own."""


@dataclass(frozen=True, slots=True)
class Generated:
    """One continuation; tuples are [tokens]."""

    text: str
    """Without the tokens that end a turn."""
    tokens: tuple[int, ...]
    log_probs: tuple[float, ...]
    finish: Literal["stop", "length"] = "stop"


class ModelClient(Protocol):
    """One pool, from `[[engines]]`. Requests of a dead engine go on elsewhere in the pool.

    Raises ValueError for what no engine could run (a prompt over the context, an id outside the vocabulary) and
    InfrastructureError where the pool can't answer; its DeadlineExceeded after `timeout_s`, 0: that of the pool. Leave
    the latter alone: the core turns them into the sample's outcome, never into a score.
    """

    name: str

    async def generate(
        self, prompt: Prompt, max_new_tokens: int = 256, *, temperature: float = 0.0, top_p: float = 1.0, seed: int = 0,
        stop: tuple[str, ...] = (), timeout_s: float = 0.0,
    ) -> Generated:  # fmt: skip
        """Continue a prompt; temperature 0 is greedy. Of the same seed and prompt the same, where the engine has seeds."""

    async def score(
        self, prompt: Prompt, completions: Sequence[str | Sequence[int]], *, temperature: float = 1.0,
        timeout_s: float = 0.0,
    ) -> tuple[tuple[float, ...], ...]:  # fmt: skip
        """Return for each completion the log-probs of its tokens behind the prompt, computed from logits / temperature.
        The very first token of an empty prompt has 0."""


NO_ENGINES: Mapping[str, ModelClient] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Load:
    """One role's load over the last window; times are shares of it."""

    engines: int
    busy: float
    waiting_for_rows: float
    """Share of the window in which the actor waited for rows."""
    waiting_for_credit: float
    """Share in which rollout was held by the staleness bound."""
    free_devices: int
    now: float


class ScalingPolicy(Configurable[OptionsT], Generic[OptionsT]):
    """Decides the number of engines."""

    kind: ClassVar[str] = "scaling-policy"

    @abstractmethod
    def engines(self, history: tuple[Load, ...]) -> int:
        """Return the number of engines that there should be now."""
