# SPDX-License-Identifier: Apache-2.0
"""A request while it is under way, and what was asked together. No IO; where a request runs, the router decides.

A request outlives engines: whoever lets go of it, for a pause, an update or its own death, leaves it the tokens it has.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace

from relax_core.api.engine import Delta, GenerateRequest
from relax_core.rollout.completion import Completion, Ending, GenerateCall, Watch
from relax_core.rollout.routes import Routes


@dataclass(slots=True)
class Pending:
    """A request under way, with the tokens it has so far: they outlive the engine that sampled them."""

    request: GenerateRequest
    watch: Watch | None = None
    session: Hashable = None
    """What it goes on with: the engine that had its last turn has its cache. None: nothing."""
    group: Hashable = None
    """Those that begin alike. None: it is alone."""
    deadline: float = math.inf
    """Of the router's time."""
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    oldest_cache: list[int] = field(default_factory=list)
    finish: Ending = ""
    error: str = ""
    routes: Routes | None = None
    """Of the experts that its positions visited, what engines told; None: nobody asks."""
    batch: tuple[Pending, ...] = ()
    """What was given to the engine in one call."""
    engine: str = ""
    """Where it runs."""
    least: int = -1
    """Oldest step that the engine may name for its tokens: what it had when it was given the request."""
    leaving: bool = False
    """Its engine was told to let go of it; it goes on afterwards."""
    settled: bool = False
    """Nobody awaits it any more; an engine may still run it."""
    alone: bool = False
    """Some of a batch was refused: each of them is given by itself, so that only the wrong one fails."""
    moves: int = 0
    """How often an engine ended it without being asked to."""

    def add(self, delta: Delta) -> None:
        """Take tokens; whoever watches them may end the turn here, whatever the engine samples beyond."""
        tokens = delta.tokens
        if tokens:
            self.tokens += tokens
            self.log_probs += delta.log_probs
            self.versions += [delta.version] * len(tokens)
            self.oldest_cache += [delta.oldest_cache] * len(tokens)
        if self.routes is not None and delta.routed_experts:
            self.routes.tell(delta.routes_from, delta.routed_experts)
        self.finish, self.error = delta.finish, delta.error
        if self.watch is not None and tokens and self.watch(self.tokens) and self.finish in ("", "abort"):
            self.finish = "stop"

    def remaining(self) -> GenerateRequest:
        """What is left to ask, on this engine or another: the prompt goes on with the tokens it got."""
        if not self.tokens:
            return self.request
        return replace(
            self.request,
            tokens=self.request.tokens + tuple(self.tokens),
            max_new_tokens=self.request.max_new_tokens - len(self.tokens),
            floor=self.floor,
        )

    def afresh(self) -> Pending:
        """As it was asked, without the tokens it got."""
        return Pending(
            self.request, self.watch, self.session, self.group, self.deadline, settled=self.settled, moves=self.moves,
            routes=None if self.routes is None else self.routes.afresh(),
        )  # fmt: skip

    @property
    def floor(self) -> int:
        """Where it may go on: its group's floor, or that of its own tokens where it has no group."""
        return self.request.floor if self.request.floor >= 0 else min(self.versions, default=-1)

    @property
    def left(self) -> int:
        """Tokens it may still get."""
        return self.request.max_new_tokens - len(self.tokens)

    @property
    def complete(self) -> bool:
        return self.left <= 0

    def completion(self) -> Completion:
        versions, oldest = tuple(self.versions), tuple(self.oldest_cache)
        kept = oldest if oldest != versions else ()
        return Completion(
            tuple(self.tokens), tuple(self.log_probs), versions, kept, self.finish, self.error, self.routes
        )


class Asked:
    """Turns that were asked together: one future, which has its result when the last of them has ended."""

    def __init__(self, calls: Sequence[GenerateCall]) -> None:
        self.future: asyncio.Future[list[Completion]] = asyncio.get_running_loop().create_future()
        self._calls, self._missing = calls, len(calls)
        self._completions: dict[int, Completion] = {}

    def settle(self, at: int, completion: Completion) -> None:
        """One of them has ended."""
        if self.future.done():
            return
        self._completions[at] = completion
        if (ended := self._calls[at].ended) is not None:
            ended()
        if len(self._completions) == self._missing:
            self.future.set_result([self._completions[number] for number in range(self._missing)])
