# SPDX-License-Identifier: Apache-2.0
"""The contract of engines, inference backends that sample tokens, and the clients of auxiliary engine pools.

An engine takes token ids and returns ids, log-probs and weight versions; the core renders, tokenizes and parses text.
Each process hosts one instance, possibly under its own Python interpreter. `Capabilities` declare what an engine can
do, and the planner refuses a configuration that needs more. Rewards and environments name auxiliary pools in
`needs_engines` and find a `ModelClient` for each in `self.engines`.
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
    """True: the engine can take new weights while requests run. False: the core stops the requests first."""
    keeps_kv_across_versions: bool = False
    """True: requests in flight can keep their KV cache over an update (`EngineSpec.kv_across_versions`)."""
    seeds: bool = False
    """True: the same seed and tokens give the same sample in any batch."""
    routed_experts: bool = False
    """True: the engine can report which experts every position visited."""
    lora: bool = False
    delta: bool = False
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")
    """Number formats in which the engine computes."""
    float32_head: bool = False
    """True: the engine can compute logits in float32 from weights of any format (`model.head_dtype`)."""
    media: frozenset[str] = frozenset()
    score: bool = False
    offloads: frozenset[str] = frozenset()
    """Parts whose device memory the engine can free: `weights`, `kv`."""
    offloads_on_cpu: bool = True
    """False: the engine frees memory only on GPUs."""
    receipts: ReceiptLevel = "wire"
    """Strongest check that the engine makes before it sends a receipt (`Receipt.level`)."""
    transports: frozenset[str] = frozenset({"shared-memory", "disk"})


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """The settings for the start of an engine."""

    model: Mapping[str, Any]
    """The `[model]` table; `dtype` is the number format of the engine and of the weights published to it. With
    `head_dtype` "float32", the product of the language head is in float32, of weights rounded to `dtype`."""
    max_context: int
    """Most tokens of prompt and completion together."""
    seed: int = 0
    deterministic: bool = False
    version: Version = field(default_factory=lambda: Version("actor", 0, 0))
    """Version of the weights in the model folder."""
    name: str = "engine-0"
    max_concurrency: int = 0
    """Most requests at once; 0: the engine chooses."""
    kv_across_versions: bool = False
    """True: requests in flight keep their KV cache over a weight update; shared prefix caches are always dropped."""
    media: str = ""
    """Directory of the run's media store (`relax_core.media.store`); empty: the run has no media."""


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """A request for one continuation.

    The returned log-probs belong to the sampled distribution: logits / temperature, restricted by top_k and top_p.
    """

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
    """Oldest step among the tokens of the group; engines with older weights refuse the request. -1: no bound."""
    routed_experts: bool = False
    """True: also return which experts every position visited (`Delta.routed_experts`)."""
    num_top: int = 0
    """Number of most likely tokens to return for each sampled token (`Delta.top`)."""


@dataclass(frozen=True, slots=True)
class Delta:
    """The new tokens of one request since its last delta."""

    id: str
    tokens: tuple[int, ...]
    log_probs: tuple[float, ...]
    version: int
    """Step of the weights that sampled the tokens. The step alone identifies the weights, because an engine runs no
    request while it takes weights of another incarnation."""
    oldest_cache: int
    """Oldest step in the KV cache that the tokens attended to; equals `version` if updates drop caches."""
    finish: FinishReason = ""
    """Reason for the end of the request; empty: more tokens follow."""
    error: str = ""
    routed_experts: bytes = b""
    """Experts of consecutive positions, prompt included: [positions, layers, top_k] in the format of `family.Routing`.
    All deltas of a request together cover every position that went through the model, so not the last sampled token.
    Positions from a cache may be missing. Of two values for a position, the first counts."""
    routed_from: int = 0
    """Index of the first position in `routed_experts`."""
    top: tuple[tuple[tuple[int, float], ...], ...] = ()
    """For each token, the `num_top` most likely (id, log-prob) pairs."""
    cached: tuple[int, int] | None = None
    """(tokens that the engine found in its prefix cache, all tokens) of the request's prompt, in the last delta; None:
    not counted."""
    drafts: tuple[int, int] | None = None
    """(drafted tokens that were kept, all drafted tokens) of the request, in the last delta; None: nothing was drafted."""


@dataclass(frozen=True, slots=True)
class Health:
    """The state that an engine reports about itself."""

    ok: bool
    """False: the engine has failed, and the core replaces it."""
    version: Version
    running: int = 0
    waiting: int = 0
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Further facts for people; `failure` is the cause of a failure."""


class Engine(Configurable[OptionsT], Generic[OptionsT]):
    """An instance of an inference backend."""

    kind: ClassVar[str] = "engine"
    capabilities: ClassVar[Capabilities] = Capabilities()
    switches: ClassVar[Mapping[str, str]] = {}
    """Costly capability -> option that must be true to enable the capability: {"delta": "keep_weights"}."""

    def devices(self) -> int:
        """Return the number of GPUs that one engine with these options uses; 0: as many as the placement assigns."""
        return 0

    @abstractmethod
    async def start(self, spec: EngineSpec) -> Mapping[str, Any]:
        """Load the model; return facts: vocab_size, max_context, fingerprint, parameters, ...

        The fact `kv_tokens` is the number of tokens that the KV cache holds; leave it out if the cache has no bound.
        """

    @abstractmethod
    def generate(self, requests: Sequence[GenerateRequest]) -> AsyncIterator[Sequence[Delta]]:
        """Continue the requests; yield their deltas until all have finished.

        Raises ValueError, before any request runs, for an id outside the vocabulary or a request over the context.
        """

    async def score(self, sequences: Sequence[Sequence[int]], temperature: float = 1.0) -> Sequence[Sequence[float]]:
        """Return the log-prob of each token given the tokens before it, from logits / temperature; the first is 0."""
        raise NotImplementedError

    @abstractmethod
    async def update_weights(self, manifest: Manifest, transport: Chosen) -> Receipt:
        """Load a version whole or not at all; the next sampled token uses the new version."""

    async def profile(self, path: str, max_bytes: int) -> None:
        """Record the engine's operations from now to its next update or its stop.

        Then write `PATH.trace.json.gz` and `PATH.operations.txt`. A trace of more than `max_bytes` is deleted. An open
        profile ends now.
        """
        raise NotImplementedError

    async def pause(self) -> None:
        """Stop sampling after the current token and keep the requests."""
        raise NotImplementedError

    async def resume(self) -> None:
        raise NotImplementedError

    async def abort(self, ids: Sequence[str]) -> None:
        """End requests now, also while paused, with finish `abort`; an empty `ids` ends all requests."""
        raise NotImplementedError

    async def offload(self, parts: Sequence[str]) -> int:
        """Free the memory of `weights` or `kv`; return the number of bytes freed."""
        raise NotImplementedError

    async def onload(self, parts: Sequence[str]) -> None:
        raise NotImplementedError

    @abstractmethod
    async def health(self) -> Health: ...

    @abstractmethod
    async def stop(self) -> None:
        """End the engine and all processes that it started."""

    def estimate(self, spec: EngineSpec, work: Workload) -> Estimate:
        """Estimate the memory and work of one engine for its part of a step; optional.

        Called on an instance that was not started. If not implemented, the memory check skips the engine and says so.
        """
        raise NotImplementedError


def switched_off(engine: type[Engine], capability: str, options: Mapping[str, Any]) -> str:
    """Return the option that must still be set to true to enable a capability; empty if no option is missing."""
    switch = engine.switches.get(capability, "")
    return "" if options.get(switch) else switch


Prompt: TypeAlias = "str | Sequence[Message] | Sequence[int]"
"""Messages are rendered with the pool's chat template; text is tokenized without a template; ids are used unchanged."""


@dataclass(frozen=True, slots=True)
class Generated:
    """One continuation of a prompt; each tuple has one entry for each token."""

    text: str
    """The continuation as text, without special tokens."""
    tokens: tuple[int, ...]
    log_probs: tuple[float, ...]
    finish: Literal["stop", "length"] = "stop"


class ModelClient(Protocol):
    """A client of one auxiliary pool (`[[engines]]`). If an engine dies, another engine continues its requests.

    Raises ValueError for a request that no engine can run: a prompt over the context, an id outside the vocabulary.
    Raises InfrastructureError if the pool can't answer, and its subclass DeadlineExceeded after `timeout_s` seconds (0:
    the pool's own limit). Do not catch these two: the core turns them into the sample's outcome.
    """

    name: str

    async def generate(
        self, prompt: Prompt, max_new_tokens: int = 256, *, temperature: float = 0.0, top_p: float = 1.0, seed: int = 0,
        stop: tuple[str, ...] = (), timeout_s: float = 0.0,
    ) -> Generated:  # fmt: skip
        """Continue a prompt; temperature 0 is greedy. `seed` fixes the result if the engine supports seeds."""

    async def score(
        self, prompt: Prompt, completions: Sequence[str | Sequence[int]], *, temperature: float = 1.0,
        timeout_s: float = 0.0,
    ) -> tuple[tuple[float, ...], ...]:  # fmt: skip
        """Return the log-probs of each completion's tokens after the prompt, from logits / temperature.

        With an empty prompt, the first token has log-prob 0.
        """


NO_ENGINES: Mapping[str, ModelClient] = MappingProxyType({})
