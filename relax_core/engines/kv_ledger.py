# SPDX-License-Identifier: Apache-2.0
"""The router's estimate of one engine's KV cache, in tokens: running requests, and idle sessions between two turns.

The router and the engine do not exchange this state, and the engine may evict in a different order. No IO, no clock.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field

from relax_core.engines.requests import PendingRequest


@dataclass(slots=True)
class KvLedger:
    """A token count of one engine's KV cache. A session: `running -> idle -> running | evicted`.

    A running request counts its prompt, sampled tokens, and a share (`reserve`) of the tokens it may still sample.

    Invariants:
    - When a request begins, the longest-idle sessions are evicted until running and idle tokens fit in `capacity`.
      Idle sessions never delay a request.
    - With `reserve` 1, `running` exceeds `capacity` only while a single oversized request runs alone.
    - A session with a running request is not idle.
    - With `capacity` 0 every request fits, and idle sessions are not counted.
    """

    capacity: int = 0
    """Size of the cache in tokens; 0: unknown or not counted."""
    reserve: float = 1.0
    """Fraction, from 0 to 1, of the tokens a request may still sample that counts as used."""
    held: int = 0
    """Prompt and sampled tokens of the running requests."""
    left: int = 0
    """Tokens that the running requests may still sample."""
    idle: OrderedDict[Hashable, int] = field(default_factory=OrderedDict)
    """Cached tokens of each session between two turns, longest idle first."""
    idle_tokens: int = 0
    _active: Counter[Hashable] = field(default_factory=Counter)
    """Number of running requests of each session."""

    @property
    def running(self) -> int:
        """Tokens of the running requests, including the reserved share of tokens still to be sampled."""
        return self.held + math.ceil(self.reserve * self.left)

    def need(self, pending: PendingRequest) -> int:
        """Return the tokens that a request would add to `running`."""
        sampled = len(pending.prompt) + len(pending.tokens)
        return sampled + math.ceil(self.reserve * pending.tokens_left)

    def fits(self, pending: PendingRequest) -> bool:
        """Return True if a request may begin, with idle sessions evicted as needed.

        A request larger than the cache may begin when nothing else runs.
        """
        return not self.capacity or not self.held or self.running + self.need(pending) <= self.capacity

    def fits_without_eviction(self, pending: PendingRequest) -> bool:
        """Return True if a request can begin without an eviction, or continues an idle session of this engine."""
        if not self.capacity or pending.session in self.idle:
            return True
        return self.running + self.idle_tokens + self.need(pending) <= self.capacity

    def holds(self, session: Hashable) -> bool:
        """Return True if a session that ran on this engine is still cached."""
        return not self.capacity or session in self.idle or session in self._active

    def places(self, tokens: int) -> int:
        """Return how many requests of `tokens` tokens fit in addition to the running requests."""
        return max(0, self.capacity - self.running) // max(1, tokens)

    def begin(self, pending: PendingRequest) -> None:
        """Add a request that starts to run; evict the longest-idle sessions if the cache is too small."""
        self.held += len(pending.prompt) + len(pending.tokens)
        self.left += pending.tokens_left
        if not self.capacity:
            return
        self.forget(pending.session)
        if pending.session is not None:
            self._active[pending.session] += 1
        while self.idle and self.running + self.idle_tokens > self.capacity:
            self.idle_tokens -= self.idle.popitem(last=False)[1]

    def sampled(self, count: int) -> None:
        """Move `count` newly sampled tokens of running requests from `left` to `held`."""
        self.held += count
        self.left -= count

    def end(self, pending: PendingRequest, kept: bool) -> None:
        """Remove a request that stopped running.

        The last running request of a session makes the session idle, if its tokens are `kept` and fit.
        """
        tokens = len(pending.prompt) + len(pending.tokens)
        self.held -= tokens
        self.left -= pending.tokens_left
        session = pending.session
        if not self.capacity or session is None:
            return
        self._active[session] -= 1
        if self._active[session]:
            return
        del self._active[session]
        if kept and self.running + tokens <= self.capacity:
            self.idle[session] = tokens
            self.idle_tokens += tokens
            while self.running + self.idle_tokens > self.capacity:
                self.idle_tokens -= self.idle.popitem(last=False)[1]

    def forget(self, session: Hashable) -> None:
        """Remove a session that is idle on this engine."""
        self.idle_tokens -= self.idle.pop(session, 0)

    def drop_idle(self) -> None:
        """Remove all idle sessions: the engine dropped its cache."""
        self.idle.clear()
        self.idle_tokens = 0

    def clear(self) -> None:
        """Remove all requests and sessions: the engine failed."""
        self.drop_idle()
        self.held = self.left = 0
        self._active.clear()
