# SPDX-License-Identifier: Apache-2.0
"""The ledger of one engine's KV cache, in tokens: what its requests hold, and what sessions between two turns left there.

It is the router's own account. The engine is neither asked nor told, and may evict in another order. No IO, no clock.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field

from relax_core.engines.requests import PendingRequest


@dataclass(slots=True)
class KvLedger:
    """Counts tokens of one engine.

    A session: `running (prompt, tokens so far, and a share of those that may still come) -> idle -> running | evicted`.

    Invariants:
    - `running` and `idle` together stay within `capacity` whenever a request begins: the sessions that have been idle for
      longest are evicted first, and idle sessions never keep a request out.
    - With `reserve` 1, `running` is above `capacity` only while one request that is larger runs alone.
    - Without a capacity nothing is bounded, and idle sessions are not counted.
    """

    capacity: int = 0
    """Tokens that the cache holds; 0: not known."""
    reserve: float = 1.0
    """Share of the tokens that a request may still sample for which room is kept."""
    held: int = 0
    """Prompts of what runs, with the tokens sampled so far."""
    left: int = 0
    """Tokens that what runs may still sample."""
    idle: OrderedDict[Hashable, int] = field(default_factory=OrderedDict)
    """Tokens of sessions between two turns, the longest idle first."""
    idle_tokens: int = 0
    _active: Counter[Hashable] = field(default_factory=Counter)
    """Requests that run, by session."""

    @property
    def running(self) -> int:
        """Tokens that what runs has or may come to have."""
        return self.held + math.ceil(self.reserve * self.left)

    def need(self, pending: PendingRequest) -> int:
        """Count the tokens that a request would hold here."""
        sampled = len(pending.request.tokens) + len(pending.tokens)
        return sampled + math.ceil(self.reserve * pending.tokens_left)

    def fits(self, pending: PendingRequest) -> bool:
        """Tell whether it may begin, idle sessions evicted where that must be; one that is larger than all may, alone."""
        return not self.capacity or not self.held or self.running + self.need(pending) <= self.capacity

    def fits_beside_idle(self, pending: PendingRequest) -> bool:
        """Tell whether it may begin without the eviction of another session, or goes on with one that is here."""
        if not self.capacity or pending.session in self.idle:
            return True
        return self.running + self.idle_tokens + self.need(pending) <= self.capacity

    def holds(self, session: Hashable) -> bool:
        """Tell whether a session that was here is still cached."""
        return not self.capacity or session in self.idle or session in self._active

    def places(self, tokens: int) -> int:
        """Count the requests of so many tokens for which there is room beside what runs."""
        return max(0, self.capacity - self.running) // max(1, tokens)

    def begin(self, pending: PendingRequest) -> None:
        """Count a request that runs from now on."""
        self.held += len(pending.request.tokens) + len(pending.tokens)
        self.left += pending.tokens_left
        if not self.capacity:
            return
        self.forget(pending.session)
        if pending.session is not None:
            self._active[pending.session] += 1
        while self.idle and self.running + self.idle_tokens > self.capacity:
            self.idle_tokens -= self.idle.popitem(last=False)[1]

    def sampled(self, count: int) -> None:
        """Count tokens that came."""
        self.held += count
        self.left -= count

    def end(self, pending: PendingRequest, kept: bool) -> None:
        """Count a request no more; its session is idle then, where its tokens are `kept` in the cache."""
        tokens = len(pending.request.tokens) + len(pending.tokens)
        self.held -= tokens
        self.left -= pending.tokens_left
        session = pending.session
        if not self.capacity or session is None:
            return
        self._active[session] -= 1
        if not self._active[session]:
            del self._active[session]
        before = self.forget(session)
        tokens = max(tokens, before)
        if kept and self.running + tokens <= self.capacity:
            self.idle[session] = tokens
            self.idle_tokens += tokens
            while self.running + self.idle_tokens > self.capacity:
                self.idle_tokens -= self.idle.popitem(last=False)[1]

    def forget(self, session: Hashable) -> int:
        """Count an idle session no more; return its tokens."""
        tokens = self.idle.pop(session, 0)
        self.idle_tokens -= tokens
        return tokens

    def drop_idle(self) -> None:
        """Count no session any more that is idle: the cache was dropped."""
        self.idle.clear()
        self.idle_tokens = 0

    def clear(self) -> None:
        """Count nothing any more: the engine is gone."""
        self.drop_idle()
        self.held = self.left = 0
        self._active.clear()
