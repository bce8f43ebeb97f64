# SPDX-License-Identifier: Apache-2.0
"""Requests for completions: what an episode asks of a model, what it gets back, and the request while it is running.

`Routes`, the experts that its positions visited, stand at the end. There is no IO here: the router decides where a
request runs. Episodes see `Generate` alone, never engines.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from relax_core.api.batch import Ragged
from relax_core.api.engine import Delta, FinishReason, GenerateRequest
from relax_core.api.family import Routing
from relax_core.api.trajectory import Node, Path

if TYPE_CHECKING:
    import numpy as np

Watch: TypeAlias = Callable[[Sequence[int]], bool]
"""Sees all tokens of a completion whenever some were sampled; True ends it there, with finish `stop`."""
Ending: TypeAlias = FinishReason | Literal["deadline"]
"""End of a completion: as its engine says, or at its deadline."""


class GenerateCall(NamedTuple):
    """One completion to sample."""

    tokens: tuple[int, ...]
    """The whole branch so far."""
    max_new_tokens: int
    seed: int
    stop_tokens: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    """Texts that end the completion: it is cut behind the first of them."""
    media: tuple[str, ...] = ()
    floor: int = -1
    """Oldest step among the tokens of the sample's group: no older engine may go on with it. -1: none."""
    session: Hashable = None
    """The same for all calls of a sample: the engine that had the last one has them in its cache."""
    group: Hashable = None
    """The same for samples that begin alike."""
    watch: Watch | None = None
    ended: Callable[[], None] | None = None
    """Called once the completion has its last token, while others that were asked with it may still be sampled."""


class Completion(NamedTuple):
    """One sampled completion; tuples are [tokens]."""

    tokens: tuple[int, ...]
    log_probs: tuple[float, ...]
    versions: tuple[int, ...]
    """Step of the weights that sampled each token."""
    oldest_cache: tuple[int, ...] = ()
    """Oldest step in the cache each token attended to; empty where caches are dropped at a publish."""
    finish: Ending = "stop"
    error: str = ""
    routes: Routes | None = None
    """Experts that the positions of the branch and of the completion visited, as far as the engine told."""
    incarnations: tuple[tuple[int, int], ...] = ((0, 0),)
    """(place of a token, incarnation of the weights that sampled it and those after it), in their order."""
    queued_s: float = 0.0
    """Seconds from when it was asked until an engine had it, without pauses."""
    generate_s: float = 0.0
    """Seconds from then to its end, without pauses."""

    def newest(self) -> list[tuple[int, int]]:
        """Return (incarnation, newest step that sampled a token) of each run of tokens of one incarnation."""
        stops = [start for start, _ in self.incarnations[1:]] + [len(self.versions)]
        runs = zip(self.incarnations, stops, strict=False)  # no engine was given it: there are none
        return [(incarnation, max(self.versions[start:stop])) for (start, incarnation), stop in runs if start < stop]


Generate: TypeAlias = Callable[[GenerateCall], Awaitable[Completion]]
GenerateAll: TypeAlias = Callable[[Sequence[GenerateCall]], Awaitable[Sequence[Completion]]]
"""Several completions that are asked for together, and awaited together."""


def singly(generate: GenerateAll) -> Generate:
    """Make a `generate` that takes one call after another."""

    async def one(call: GenerateCall) -> Completion:
        (completion,) = await generate((call,))
        return completion

    return one


def cut(completion: Completion, stop: tuple[str, ...], decode: Callable[[tuple[int, ...]], str]) -> Completion:
    """Cut a completion behind the token that completes the first stop text; engines see ids only and may pass it."""
    if not any(text in decode(completion.tokens) for text in stop):
        return completion
    lengths = range(1, len(completion.tokens) + 1)
    end = next(n for n in lengths if any(text in decode(completion.tokens[:n]) for text in stop))
    return Completion(
        completion.tokens[:end], completion.log_probs[:end], completion.versions[:end], completion.oldest_cache[:end],
        routes=completion.routes, incarnations=completion.incarnations, queued_s=completion.queued_s,
        generate_s=completion.generate_s,
    )  # fmt: skip


def watch_for(stop: tuple[str, ...], decode: Callable[[tuple[int, ...]], str]) -> Watch | None:
    """Make a watch that ends a completion at a stop text, so that no engine goes on for what `cut` would throw away."""
    if not stop:
        return None
    seen = 0
    max_tokens = max(len(text.encode()) for text in stop)
    """Tokens that a text may lie over: a token that shows at all is a byte of it or more."""

    def watch(tokens: Sequence[int]) -> bool:
        nonlocal seen
        text = decode(tuple(tokens[max(0, seen - max_tokens) :]))
        seen = len(tokens)
        return any(wanted in text for wanted in stop)

    return watch


@dataclass(slots=True)
class PendingRequest:
    """A request that is not completed, with the tokens it has so far.

    Invariants:
    - `tokens`, `log_probs`, `versions` and `oldest_cache` have one entry a token.
    - The tokens outlive the engine that sampled them: after a pause, an update or a failure they are part of the prompt.
    - `engine` is set while it runs there; `batch` is then the batch it was dispatched in.
    - While it runs, its engine has weights of one incarnation, the last of `incarnations`.
    """

    request: GenerateRequest
    watch: Watch | None = None
    session: Hashable = None
    """Sample that it goes on with: the engine that had its last call has its cache. None: nothing."""
    group: Hashable = None
    """Samples that begin alike. None: it is alone."""
    deadline: float = math.inf
    """In the router's active time."""
    asked_at: float | None = None
    """When it was asked for, in active time; None: when it is submitted."""
    began_at: float | None = None
    """When an engine was first given it; None: none has been."""
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    oldest_cache: list[int] = field(default_factory=list)
    incarnations: list[tuple[int, int]] = field(default_factory=list)
    """As `Completion.incarnations`: noted when an engine is given the request, not for each token."""
    finish: Ending = ""
    error: str = ""
    routes: Routes | None = None
    """Experts that its positions visited, as engines told; None: nobody asks."""
    batch: tuple[PendingRequest, ...] = ()
    """Requests that were given to the engine in one call."""
    engine: str = ""
    """Name of the engine that runs it."""
    min_step: int = -1
    """Oldest step that the engine may name for its tokens: the one it had when it was given the request."""
    preempted: bool = False
    """The engine was told to end it; it goes on afterwards."""
    settled: bool = False
    """Nobody awaits it any more; an engine may still run it."""
    dispatch_alone: bool = False
    """An engine refused its batch: it is given by itself, so that only a wrong one fails."""
    num_aborts: int = 0
    """Times that an engine ended it without being asked to."""

    def add(self, delta: Delta) -> None:
        """Take tokens; a watch may end the completion here, whatever the engine samples beyond."""
        tokens = delta.tokens
        if tokens:
            self.tokens += tokens
            self.log_probs += delta.log_probs
            self.versions += [delta.version] * len(tokens)
            self.oldest_cache += [delta.oldest_cache] * len(tokens)
        if self.routes is not None and delta.routed_experts:
            self.routes.add(delta.routes_from, delta.routed_experts)
        self.finish, self.error = delta.finish, delta.error
        if self.watch is not None and tokens and self.watch(self.tokens) and self.finish in ("", "abort"):
            self.finish = "stop"

    def continuation(self) -> GenerateRequest:
        """Make the request for the tokens that are left, on this engine or another: the prompt has the others."""
        if not self.tokens:
            return self.request
        return replace(
            self.request, tokens=self.request.tokens + tuple(self.tokens), max_new_tokens=self.tokens_left,
            floor=self.floor,
        )  # fmt: skip

    def restarted(self) -> PendingRequest:
        """Make the same request without the tokens it got."""
        return PendingRequest(
            self.request, self.watch, self.session, self.group, self.deadline, settled=self.settled,
            num_aborts=self.num_aborts, asked_at=self.asked_at, began_at=self.began_at,
            routes=None if self.routes is None else Routes(self.routes.routing),
        )  # fmt: skip

    @property
    def floor(self) -> int:
        """Oldest step that may go on with it: its group's floor, or that of its own tokens where it has no group."""
        return self.request.floor if self.request.floor >= 0 else min(self.versions, default=-1)

    @property
    def tokens_left(self) -> int:
        """Tokens it may still get."""
        return self.request.max_new_tokens - len(self.tokens)

    @property
    def complete(self) -> bool:
        return self.tokens_left <= 0

    def completion(self, time: float | None = None) -> Completion:
        """Make its result; `time`: the router's active time, None where nobody asks how long it took."""
        versions, oldest = tuple(self.versions), tuple(self.oldest_cache)
        kept = oldest if oldest != versions else ()
        queued_s = generate_s = 0.0
        if time is not None and self.asked_at is not None:
            began_at = time if self.began_at is None else self.began_at
            queued_s, generate_s = began_at - self.asked_at, time - began_at
        return Completion(
            tuple(self.tokens), tuple(self.log_probs), versions, kept, self.finish, self.error, self.routes,
            tuple(self.incarnations), queued_s, generate_s,
        )  # fmt: skip


_KNOWN, _HOLE = b"\1", b"\0"


class Routes:
    """Routes of a sequence, by position from 0.

    Invariants:
    - The first report of a position stays: what another engine, or newer weights, make of it later is not what the sample
      was drawn from.
    - A position that nobody reported is a hole of zeros, which a later call may fill.
    """

    __slots__ = ("_known", "_values", "routing", "width")

    def __init__(self, routing: Routing) -> None:
        self.routing, self.width = routing, routing.width
        self._values, self._known = bytearray(), bytearray()

    def __len__(self) -> int:
        """Count positions up to the last that was reported."""
        return len(self._known)

    def add(self, start: int, values: bytes) -> None:
        """Take routes of consecutive positions; those that are known stay."""
        width, stop = self.width, start + len(values) // self.width
        had = len(self._known)
        if stop > had:
            self._values += bytes((stop - had) * width)
            self._known += bytes(stop - had)
        if start >= had or 1 not in self._known[start:stop]:
            self._values[start * width : stop * width] = values
            self._known[start:stop] = _KNOWN * (stop - start)
            return
        for at in range(start, stop):
            if not self._known[at]:
                self._values[at * width : (at + 1) * width] = values[(at - start) * width : (at + 1 - start) * width]
                self._known[at] = 1

    def fault(self, start: int, values: bytes, length: int) -> str:
        """Say what can't be true of routes of a sequence of so many tokens; empty where it may be."""
        count, over = divmod(len(values), self.width)
        if over or start < 0 or start + count > length:
            return f"{len(values)} bytes of routes from position {start}, {self.width} each, for {length} tokens"
        most = int(_array(values, self.routing).max(initial=0))
        return f"expert {most}, of {self.routing.experts}" if most >= self.routing.experts else ""

    def between(self, start: int, stop: int) -> tuple[bytes, bytes]:
        """Return (routes, known) of these positions; holes are zeros."""
        values = bytes(self._values[start * self.width : stop * self.width])
        known = bytes(self._known[start:stop])
        return values.ljust((stop - start) * self.width, _HOLE), known.ljust(stop - start, _HOLE)


def filled(node: Node, start: int, routes: Routes) -> tuple[bytes, bytes] | None:
    """Fill a node's (routes, routed) with what is known of its positions from `start`; None where nothing is new."""
    if node.routed and _HOLE not in node.routed:
        return None
    values_here, known = routes.between(start, start + len(node.tokens))
    if not node.routed:
        return (values_here, known) if _KNOWN in known else None
    values, have, width = bytearray(node.routes), bytearray(node.routed), routes.width
    fresh = [at for at, (mine, theirs) in enumerate(zip(have, known, strict=True)) if theirs and not mine]
    for at in fresh:
        values[at * width : (at + 1) * width] = values_here[at * width : (at + 1) * width]
        have[at] = 1
    return (bytes(values), bytes(have)) if fresh else None


def route_columns(paths: Sequence[Path], routing: Routing, lengths: np.ndarray) -> dict[str, Ragged]:
    """Make the columns of rows whose nodes are these; `lengths` are their numbers of tokens."""
    import numpy as np

    nodes = [node for path in paths for node, _ in path]
    values = b"".join(node.routes or bytes(len(node.tokens) * routing.width) for node in nodes)
    known = b"".join(node.routed or bytes(len(node.tokens)) for node in nodes)
    return {
        "routed_experts": Ragged(_array(values, routing), lengths),
        "routed_valid": Ragged(np.frombuffer(known, np.uint8), lengths),
    }


def _array(values: bytes, routing: Routing) -> np.ndarray:
    """[positions, layers, top_k]."""
    import numpy as np

    told = np.frombuffer(values, np.dtype(routing.dtype).newbyteorder("<"))
    return told.astype(routing.dtype, copy=False).reshape(-1, routing.layers, routing.top_k)
