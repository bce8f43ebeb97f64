# SPDX-License-Identifier: Apache-2.0
"""A request while it is under way, and what was asked together. No IO; where a request runs, the router decides.

A request outlives engines: whoever lets go of it, for a pause, an update or its own death, leaves it the tokens it has.

What an episode asks of the policy and gets back. Engines and routing are behind `Generate`; episodes never see them.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, TypeAlias

from relax_core.api.engine import Delta, FinishReason, GenerateRequest
from relax_core.engines.routes import Routes

Watch: TypeAlias = Callable[[Sequence[int]], bool]
"""Sees all tokens of a turn whenever some were sampled; True ends the turn there, with finish `stop`."""


Ending: TypeAlias = FinishReason | Literal["deadline"]
"""How a turn ends: as its engine says, or at its deadline."""


class GenerateCall(NamedTuple):
    """One turn to sample."""

    tokens: tuple[int, ...]
    """The whole branch so far."""
    max_new_tokens: int
    seed: int
    stop_tokens: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    """Texts that end the turn: it is cut behind the first of them."""
    media: tuple[str, ...] = ()
    floor: int = -1
    """Oldest step among the tokens of the sample's group: no older engine may go on with it. -1: none."""
    session: Hashable = None
    """The same for all turns of a sample: the engine that had the last one has them in its cache."""
    group: Hashable = None
    """The same for samples that begin alike."""
    watch: Watch | None = None
    ended: Callable[[], None] | None = None
    """Called once the turn has its last token, while others that were asked with it may still be sampled."""


class Completion(NamedTuple):
    """One sampled turn; tuples are [tokens]."""

    tokens: tuple[int, ...]
    log_probs: tuple[float, ...]
    versions: tuple[int, ...]
    """Step of the weights that sampled each token."""
    oldest_cache: tuple[int, ...] = ()
    """Oldest step in the cache each token attended to; empty where caches are dropped at a publish."""
    finish: Ending = "stop"
    error: str = ""
    routes: Routes | None = None
    """Which experts the positions of the branch and of the turn visited, as far as the engine told."""


def cut(completion: Completion, stop: tuple[str, ...], decode: Callable[[tuple[int, ...]], str]) -> Completion:
    """The completion up to the token that completes the first stop text; engines see ids only and may sample beyond it."""
    if not stop or not any(text in decode(completion.tokens) for text in stop):
        return completion
    ends = (
        n for n in range(1, len(completion.tokens) + 1) if any(text in decode(completion.tokens[:n]) for text in stop)
    )
    end = next(ends)
    return Completion(
        completion.tokens[:end], completion.log_probs[:end], completion.versions[:end], completion.oldest_cache[:end],
        routes=completion.routes,
    )  # fmt: skip


def watch_for(stop: tuple[str, ...], decode: Callable[[tuple[int, ...]], str]) -> Watch | None:
    """Ends a turn as soon as one of the texts is in it, so that no engine goes on for what `cut` would throw away."""
    if not stop:
        return None
    looked = 0
    reach = max(len(text.encode()) for text in stop)
    """Tokens that a text may lie over: a token that shows at all is a byte of it or more."""

    def seen(tokens: Sequence[int]) -> bool:
        nonlocal looked
        text = decode(tuple(tokens[max(0, looked - reach) :]))
        looked = len(tokens)
        return any(wanted in text for wanted in stop)

    return seen


Generate: TypeAlias = Callable[[GenerateCall], Awaitable[Completion]]
GenerateAll: TypeAlias = Callable[[Sequence[GenerateCall]], Awaitable[Sequence[Completion]]]
"""Several turns that are asked together, and awaited together."""


def singly(generate: GenerateAll) -> Generate:
    """For who takes one turn after another."""

    async def one(call: GenerateCall) -> Completion:
        (completion,) = await generate((call,))
        return completion

    return one


@dataclass(slots=True)
class PendingRequest:
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
    batch: tuple[PendingRequest, ...] = ()
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

    def afresh(self) -> PendingRequest:
        """As it was asked, without the tokens it got."""
        return PendingRequest(
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


class RequestBatch:
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
