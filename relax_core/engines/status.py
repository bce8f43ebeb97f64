# SPDX-License-Identifier: Apache-2.0
"""An engine as the router sees it, and what it may say: an engine that says anything else is not to be trusted."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum

from relax_core.api.engine import Delta
from relax_core.engines.requests import PendingRequest

ROUNDING = 1e-3
"""A token's log-prob may lie this much above 0."""


class EngineStatus(Enum):
    """Whether an engine gets requests."""

    OUT = "out"
    """It is being started, or was found dead, hanging or lying: only a proof of the newest weights lets it in."""
    WAITING = "waiting"
    """Up, and its weights are older than anything that may be sampled."""
    SERVING = "serving"


@dataclass(slots=True)
class EngineState:
    """One engine of a pool."""

    name: str
    standing: EngineStatus = EngineStatus.OUT
    step: int = 0
    """Of the weights that it proved."""
    most: int = 0
    """Newest step that it may name: it may have new weights before its proof of them has arrived."""
    loading: bool = False
    held: set[str] = field(default_factory=set)
    """Why it gets nothing new: `paused`, `updating`."""
    life: int = 0
    """Counts its deaths: what an earlier life still says is not heard."""
    cache: int = 0
    """Counts the times that its prefix cache was dropped."""
    failures: int = 0
    """Lives in a row without a finished request."""
    heard_at: float = 0.0
    """When it last said something, or began to run requests."""
    work: int = 0
    """Tokens it still may have to sample."""
    running: dict[str, PendingRequest] = field(default_factory=dict)

    @property
    def able(self) -> bool:
        """Whether it may be given requests now."""
        return self.standing is EngineStatus.SERVING and not self.held

    def take(self, pending: PendingRequest) -> None:
        """It runs this from now on."""
        pending.engine, pending.least, pending.leaving = self.name, self.step, False
        self.running[pending.request.id] = pending
        self.work += pending.left

    def leave(self, pending: PendingRequest) -> None:
        """It runs this no more."""
        del self.running[pending.request.id]
        self.work -= pending.left
        pending.engine, pending.batch = "", ()  # a batch holds its members: a ring that only the collector would find

    def load(self, step: int) -> None:
        """New weights are on their way into it; they may be of an older step where the trainer was rolled back."""
        self.loading, self.most = True, max(self.step, step)
        if step < self.step:
            for pending in self.running.values():
                pending.least = min(pending.least, step)

    def prove(self, step: int, now: float) -> None:
        """It has shown that it holds the weights of this step."""
        self.cache += 1
        self.step, self.most, self.heard_at = step, max(self.most, step), now
        self.loading, self.standing = False, EngineStatus.SERVING


def response_fault(delta: Delta, pending: PendingRequest, most: int, vocab_size: int) -> str:
    """What can't be true of an engine's answer; empty where it may be. `vocab_size` 0: unknown."""
    tokens, log_probs = delta.tokens, delta.log_probs
    if len(log_probs) != len(tokens):
        return f"{len(log_probs)} log-probs for {len(tokens)} tokens"
    if delta.routed_experts and pending.routes is not None:
        length = len(pending.request.tokens) + len(pending.tokens) + len(tokens)
        if wrong := pending.routes.wrong(delta.routes_from, delta.routed_experts, length):
            return wrong
    if not tokens:
        return ""
    if not pending.least <= delta.oldest_cache <= delta.version <= most:
        return (
            f"tokens of step {delta.version} with a cache of {delta.oldest_cache}; it has had {pending.least} to {most}"
        )
    if len(tokens) > pending.left:
        return f"{len(tokens)} tokens where {pending.left} were left"
    if vocab_size and not (min(tokens) >= 0 and max(tokens) < vocab_size):
        bad = next(token for token in tokens if not 0 <= token < vocab_size)
        return f"token {bad}, outside the vocabulary of {vocab_size}"
    if not (sum(log_probs) > -math.inf and max(log_probs) <= ROUNDING):  # the sum of a NaN is one
        return f"log-probs {log_probs[:4]}; each is a finite number of at most 0"
    return ""
