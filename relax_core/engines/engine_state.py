# SPDX-License-Identifier: Apache-2.0
"""The router's view of an engine, the choice of an engine by prefix cache, and checks of engine responses. No IO."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from operator import index
from typing import TypeVar, get_args

from relax_core.api.engine import Delta, FinishReason
from relax_core.api.weights import Version
from relax_core.engines.kv_ledger import KvLedger
from relax_core.engines.requests import PendingRequest
from relax_core.registry.error_text import said
from relax_core.registry.shapes import shown
from relax_core.rpc.waiting import RestartBudget

T = TypeVar("T")
FINISHES: tuple[str, ...] = get_args(FinishReason)
MODEL_FOLDER = Version("actor", 0, 0)
MAX_FAILURES = 8
"""Most failures of one engine in a row, without a finished request in between; one more fails the pool."""
MAX_KNOWN = 1 << 16
"""Most sessions, and most groups, whose engines are remembered; the least recently recorded are dropped first."""
ROUNDING = 1e-3
"""Largest log-prob that is accepted as a rounding error above 0."""


class EngineStatus(Enum):
    """The status of an engine in the router."""

    OUT = "out"
    """Out of service: starting, or failed (dead, hanging, invalid response) until a new engine proves the weights."""
    WAITING = "waiting"
    """Started in a resumed run whose first weights have not arrived. The model folder's weights may not be sampled."""
    SERVING = "serving"
    """In service: the only status in which an engine gets requests."""
    JOINING = "joining"
    """An engine that was added to a live pool and has not served yet. It counts as no capacity."""
    LEAVING = "leaving"
    """An engine that is drained, to be removed: it gets no new requests and is not replaced."""


@dataclass(slots=True)
class EngineState:
    """The state of one engine: `out -> serving -> out`, or `out -> waiting -> serving` before the first weights.

    An engine of a pool that is scaled: `joining -> serving -> leaving -> removed`.

    The slot sets `loaded` and `paused`; the router and the supervisor set the remaining fields.

    Invariants:
    - `version.step <= max_step`: responses may name steps up to the weights that are loading, before their proof
      arrives.
    - Tokens of steps above `loaded` are held until `loaded` reaches their step. A failure drops held tokens.
    - Weights of another incarnation are loaded only while nothing runs, so that all responses to a dispatch are of one
      incarnation.
    - A failed engine runs nothing, and its count of `failures` is increased, so that late responses are ignored.
    """

    name: str
    status: EngineStatus = EngineStatus.OUT
    version: Version = MODEL_FOLDER
    """Version of the last proved weights with which the engine served."""
    max_step: int = 0
    """Newest weight step that responses may name. An engine samples with new weights before their proof arrives."""
    loaded: Version = MODEL_FOLDER
    """Version of the last proved weights that the worker has; the engine serves them after `Router.on_proved`."""
    loading: str = ""
    """Version that the engine loads or proves; empty: none."""
    paused: bool = False
    """True if the engine may not sample; it keeps its requests if it supports pausing."""
    holds: set[str] = field(default_factory=set)
    """Reasons why the engine gets no new requests: `paused`, `updating`; empty: none."""
    failures: int = 0
    """Number of failures of the engine since the start of the run."""
    cache_epoch: int = 0
    """Number of times that the prefix cache was dropped."""
    restarts: RestartBudget = field(default_factory=lambda: RestartBudget(MAX_FAILURES))
    last_heard: float = 0.0
    """Time of the engine's last response, or of a dispatch to the idle engine, a proof of weights or a resume."""
    kv: KvLedger = field(default_factory=KvLedger)
    running: dict[str, PendingRequest] = field(default_factory=dict)
    """Requests that run on the engine, by id."""
    held: dict[str, list[Delta]] = field(default_factory=dict)
    """Responses to each request from its first token of unproved weights on, by id."""

    @property
    def available(self) -> bool:
        """True if the engine may get requests now."""
        return self.status is EngineStatus.SERVING and not self.holds

    @property
    def member(self) -> bool:
        """True if the engine counts as capacity of its pool, even if it is being replaced."""
        return self.status not in (EngineStatus.JOINING, EngineStatus.LEAVING)

    def add(self, pending: PendingRequest) -> None:
        pending.engine, pending.min_step, pending.preempted = self.name, self.version.step, False
        if not pending.incarnations or pending.incarnations[-1][1] != self.version.incarnation:
            pending.incarnations.append((len(pending.tokens), self.version.incarnation))
        self.running[pending.id] = pending
        self.kv.begin(pending)

    def remove(self, pending: PendingRequest, kept: bool = True) -> None:
        """Remove a request; `kept`: its tokens stay in the engine's cache for the next turn."""
        del self.running[pending.id]
        self.held.pop(pending.id, None)
        self.kv.end(pending, kept)
        pending.engine, pending.batch = "", ()  # breaks the reference cycle between a batch and its members


class PrefixAffinity:
    """A record of which engines have a session's or group's prefix cached, used to choose the engine of a request.

    Invariants:
    - An engine with the prefix is preferred unless it has too much work: its requests may still sample more tokens than
      those of the least busy engine at or above the floor, by at most the request's own tokens, which the cache saves.
    - A prefix counts as lost when the engine failed or got new weights (`cache_epoch` changed). A session's prefix is
      also lost when the engine's `KvLedger` evicted it.
    """

    def __init__(self) -> None:
        self._sessions: dict[Hashable, tuple[str, int]] = {}
        self._groups: dict[Hashable, dict[str, int]] = {}

    def choose(self, available: Sequence[EngineState], pending: PendingRequest, floor: int) -> EngineState | None:
        """Return the engine for a request; None if no engine has weights at or above the step `floor`.

        The weights of all available engines are of one incarnation, so that their steps can be compared.
        """
        least: EngineState | None = None
        for engine in available:
            if engine.version.step >= floor and (least is None or engine.kv.left < least.kv.left):
                least = engine
        if least is None or len(available) == 1:
            return least
        session, epoch = self._sessions.get(pending.session, ("", 0))
        group = self._groups.get(pending.group, {})
        if not (session or group):
            return least
        bound = least.kv.left + len(pending.prompt) + len(pending.tokens)
        cached: EngineState | None = None
        for engine in available:
            if engine.kv.left > bound or engine.version.step < floor:
                continue
            if engine.name == session and engine.cache_epoch == epoch and engine.kv.holds(pending.session):
                return engine
            if group.get(engine.name) == engine.cache_epoch and (cached is None or engine.kv.left < cached.kv.left):
                cached = engine
        return least if cached is None else cached

    def record(self, pending: PendingRequest, engine: EngineState) -> None:
        """Record that a request runs on this engine."""
        if pending.session is not None:
            _set_newest(self._sessions, pending.session, (engine.name, engine.cache_epoch))
        if pending.group is not None:
            epochs = self._groups.get(pending.group, {})
            epochs[engine.name] = engine.cache_epoch
            _set_newest(self._groups, pending.group, epochs)

    def forget(self, sessions: Collection[Hashable]) -> None:
        """Drop the records of sessions that have ended."""
        for session in sessions if self._sessions else ():
            self._sessions.pop(session, None)


def _set_newest(known: dict[Hashable, T], key: Hashable, value: T) -> None:
    known.pop(key, None)
    known[key] = value
    if len(known) > MAX_KNOWN:
        del known[next(iter(known))]


def response_fault(delta: Delta, pending: PendingRequest, max_step: int, vocab_size: int, held: int = 0) -> str:
    """Return why an engine's response is invalid; empty: valid. `vocab_size` 0: unknown.

    `held`: tokens of earlier responses that the request does not have yet.
    """
    try:
        tokens, log_probs, count = delta.tokens, delta.log_probs, len(delta.tokens)
        if delta.finish not in FINISHES:
            return f"finish {delta.finish!r}; want one of {', '.join(map(repr, FINISHES))}"
        if len(log_probs) != count:
            return f"{len(log_probs)} log-probs for {count} tokens"
        if delta.routed_experts and pending.routed_experts is not None:
            length = len(pending.prompt) + len(pending.tokens) + held + count
            if fault := pending.routed_experts.fault(delta.routed_from, delta.routed_experts, length):
                return fault
        if delta.cached is not None:
            cached, prompt = delta.cached
            if not 0 <= index(cached) <= index(prompt):
                return f"{cached} cached tokens of a prompt with {prompt}"
        if delta.drafts is not None:
            kept, drafted = delta.drafts
            if not 0 <= index(kept) <= index(drafted):
                return f"{kept} of {drafted} drafted tokens kept"
        if not tokens:
            return ""
        deque(map(index, tokens), 0)  # raises TypeError for a token that is not a whole number
        if not pending.min_step <= delta.oldest_cache <= delta.version <= max_step:
            return (
                f"tokens of step {delta.version} with a cache of step {delta.oldest_cache}; expected steps "
                f"{pending.min_step} to {max_step}"
            )
        if count > (left := pending.tokens_left - held):
            return f"{count} tokens for a request with {left} left to sample"
        if vocab_size and not (min(tokens) >= 0 and max(tokens) < vocab_size):
            bad = next(token for token in tokens if not 0 <= token < vocab_size)
            return f"token {bad}, outside the vocabulary of {vocab_size}"
        if not are_log_probs(log_probs):
            return f"log-probs {log_probs[:4]}; each must be finite and at most 0"
        return ""
    except (TypeError, ValueError, AttributeError) as error:  # fields of other types
        return f"{shown(delta)}: {said(error)}"


def are_log_probs(values: Sequence[float]) -> bool:
    """Return True if each value is finite and at most 0, up to rounding."""
    return sum(values) > -math.inf and max(values) <= ROUNDING  # a NaN makes the sum NaN, which fails the comparison
