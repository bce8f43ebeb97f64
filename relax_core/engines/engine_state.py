# SPDX-License-Identifier: Apache-2.0
"""An engine as the router sees it, the choice of one by its prefix cache, and the validation of its answers. No IO."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeVar

from relax_core.api.engine import Delta
from relax_core.api.weights import Version
from relax_core.engines.kv_ledger import KvLedger
from relax_core.engines.requests import PendingRequest
from relax_core.rpc.waiting import RestartBudget

T = TypeVar("T")
MODEL_FOLDER = Version("actor", 0, 0)
MAX_FAILURES = 8
"""Failures of one engine in a row without a finished request between them."""
MAX_KNOWN = 1 << 16
"""Sessions, and groups, whose engines are remembered; the oldest are forgotten first."""
ROUNDING = 1e-3
"""A token's log-prob may lie this much above 0."""


class EngineStatus(Enum):
    """Standing of an engine: only a serving one gets requests."""

    OUT = "out"
    """Being started, or found dead, hanging or wrong: only a proof of the newest weights lets it in."""
    WAITING = "waiting"
    """Up, with weights that are older than anything that may be sampled."""
    SERVING = "serving"


@dataclass(slots=True)
class EngineState:
    """One engine of a pool: `out -> serving -> out`, or `out -> waiting -> serving` before the first weights.

    Invariants:
    - `version.step <= max_step`: answers may name steps up to the weights that are loading, the proof comes later.
    - Weights of another incarnation are loaded only while it runs nothing: what it says of a request is of one incarnation.
    - `pending_tokens` is the sum of `tokens_left` of what is running.
    - An engine that is out runs nothing, and `incarnation` has grown: late answers of the one before are ignored.
    """

    name: str
    status: EngineStatus = EngineStatus.OUT
    version: Version = MODEL_FOLDER
    """Weights that it proved last."""
    max_step: int = 0
    """Newest step that it may name: it may have new weights before its proof of them has arrived."""
    loading: bool = False
    holds: set[str] = field(default_factory=set)
    """Reasons why it gets nothing new: `paused`, `updating`."""
    incarnation: int = 0
    """Counts its failures; it has nothing to do with the incarnation of its weights."""
    cache_epoch: int = 0
    """Counts the times that its prefix cache was dropped."""
    failures: RestartBudget = field(default_factory=lambda: RestartBudget(MAX_FAILURES))
    last_heard: float = 0.0
    """When it last said something, or began to run requests."""
    pending_tokens: int = 0
    """Tokens it still may have to sample."""
    kv: KvLedger = field(default_factory=KvLedger)
    """Account of its KV cache."""
    running: dict[str, PendingRequest] = field(default_factory=dict)

    @property
    def available(self) -> bool:
        """True where it may be given requests now."""
        return self.status is EngineStatus.SERVING and not self.holds

    def add(self, pending: PendingRequest) -> None:
        pending.engine, pending.min_step, pending.preempted = self.name, self.version.step, False
        if not pending.incarnations or pending.incarnations[-1][1] != self.version.incarnation:
            pending.incarnations.append((len(pending.tokens), self.version.incarnation))
        self.running[pending.request.id] = pending
        self.pending_tokens += pending.tokens_left
        self.kv.begin(pending)

    def sampled(self, count: int) -> None:
        """Count tokens that a request which is awaited got."""
        self.pending_tokens -= count
        self.kv.sampled(count)

    def remove(self, pending: PendingRequest, kept: bool = True) -> None:
        """`kept`: the tokens stay in its cache for the next turn."""
        del self.running[pending.request.id]
        self.pending_tokens -= pending.tokens_left
        self.kv.end(pending, kept)
        pending.engine, pending.batch = "", ()  # a batch holds its members: a ring that only the collector would find


class PrefixAffinity:
    """Chooses the engine that has a request's beginning cached, unless it is too busy; else the least busy.

    Invariants:
    - A cache is worth as many tokens of work as it saves: no engine is chosen that has more work than the least busy one
      at or above the floor by more than the request's own tokens so far.
    - A cache is gone when its engine fails or gets other weights: the `cache_epoch` has changed; that of a session also when
      the engine's ledger has evicted it.
    """

    def __init__(self) -> None:
        self._sessions: dict[Hashable, tuple[str, int]] = {}
        self._groups: dict[Hashable, dict[str, int]] = {}

    def choose(self, available: Sequence[EngineState], pending: PendingRequest, floor: int) -> EngineState | None:
        """None where no engine is at or above the floor. All that are available have weights of one incarnation."""
        least: EngineState | None = None
        for engine in available:
            if engine.version.step >= floor and (least is None or engine.pending_tokens < least.pending_tokens):
                least = engine
        session, epoch = self._sessions.get(pending.session, ("", 0))
        group = self._groups.get(pending.group, {})
        if least is None or len(available) == 1 or not (session or group):
            return least
        bound = least.pending_tokens + len(pending.request.tokens) + len(pending.tokens)
        cached: EngineState | None = None
        for engine in available:
            if engine.pending_tokens > bound or engine.version.step < floor:
                continue
            if engine.name == session and engine.cache_epoch == epoch and engine.kv.holds(pending.session):
                return engine
            if group.get(engine.name) == engine.cache_epoch and (
                cached is None or engine.pending_tokens < cached.pending_tokens
            ):
                cached = engine
        return least if cached is None else cached

    def record(self, pending: PendingRequest, engine: EngineState) -> None:
        """Remember that a request runs on this engine."""
        if pending.session is not None:
            _set_newest(self._sessions, pending.session, (engine.name, engine.cache_epoch))
        if pending.group is not None:
            epochs = self._groups.get(pending.group, {})
            epochs[engine.name] = engine.cache_epoch
            _set_newest(self._groups, pending.group, epochs)

    def forget(self, session: Hashable) -> None:
        """Remember no more of a session: it has ended."""
        self._sessions.pop(session, None)


def _set_newest(known: dict[Hashable, T], key: Hashable, value: T) -> None:
    known.pop(key, None)
    known[key] = value
    if len(known) > MAX_KNOWN:
        del known[next(iter(known))]


def response_fault(delta: Delta, pending: PendingRequest, max_step: int, vocab_size: int) -> str:
    """Say what can't be true of an engine's answer; empty where it may be. `vocab_size` 0: unknown."""
    tokens, log_probs = delta.tokens, delta.log_probs
    if len(log_probs) != len(tokens):
        return f"{len(log_probs)} log-probs for {len(tokens)} tokens"
    if delta.routed_experts and pending.routes is not None:
        length = len(pending.request.tokens) + len(pending.tokens) + len(tokens)
        if fault := pending.routes.fault(delta.routes_from, delta.routed_experts, length):
            return fault
    if not tokens:
        return ""
    if not pending.min_step <= delta.oldest_cache <= delta.version <= max_step:
        return (
            f"tokens of step {delta.version} with a cache of {delta.oldest_cache}; it has had {pending.min_step} to "
            f"{max_step}"
        )
    if len(tokens) > pending.tokens_left:
        return f"{len(tokens)} tokens where {pending.tokens_left} were left"
    if vocab_size and not (min(tokens) >= 0 and max(tokens) < vocab_size):
        bad = next(token for token in tokens if not 0 <= token < vocab_size)
        return f"token {bad}, outside the vocabulary of {vocab_size}"
    if not are_log_probs(log_probs):
        return f"log-probs {log_probs[:4]}; each is a finite number of at most 0"
    return ""


def are_log_probs(values: Sequence[float]) -> bool:
    """Tell whether each is a finite number of at most 0, but for rounding."""
    return sum(values) > -math.inf and max(values) <= ROUNDING  # the sum of a NaN is one
