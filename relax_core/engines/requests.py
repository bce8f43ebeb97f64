# SPDX-License-Identifier: Apache-2.0
"""Requests to an engine pool with the tokens sampled so far, and the experts that a mixture of experts chose.

Episodes call a `Generate` function and never see engines; the router decides where a request runs. This module does no
IO.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

from relax_core.api.batch import Ragged
from relax_core.api.engine import Delta, FinishReason, GenerateRequest
from relax_core.api.family import Routing
from relax_core.api.trajectory import Node, Path

if TYPE_CHECKING:
    import numpy as np

Watch: TypeAlias = Callable[[Sequence[int]], bool]
"""A function called with all tokens of a completion whenever new ones arrive; True ends it there with finish `stop`."""
Ending: TypeAlias = FinishReason | Literal["deadline"]
"""Finish reason of a completion: the engine's, or `deadline`."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Parameters for sampling tokens; training and evaluation use different values."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    routing: Routing | None = None
    """Routing of the MoE model if its experts are to be recorded; None: do not record them."""


SAMPLING = SamplingParams()


@dataclass(slots=True, eq=False)
class PendingRequest:
    """A request for one completion, with the tokens sampled so far.

        made by a sample's branch -> submitted -> running on an engine -> settled -> read by the branch

    The branch, the group, the pool and the router pass on this object. An engine gets its `continuation`.

    Invariants:
    - `tokens`, `log_probs`, `versions` and `oldest_cache` have one entry per sampled token.
    - Sampled tokens survive a pause, a weight update and the failure of their engine: they become part of the next
      prompt.
    - Tokens of a settled request do not change, even if an engine still runs the request.
    - `engine` and `batch` are set while the request runs; `batch` holds the requests of the same dispatch.
    - While a request runs, the incarnation of its engine's weights is constant and is the last in `incarnations`.
    """

    prompt: tuple[int, ...]
    """All tokens of the branch so far."""
    max_new_tokens: int
    seed: int = 0
    sampling: SamplingParams = SAMPLING
    stop_tokens: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    """Stop texts. An engine does not see them; `watch` ends the request, and `stop_end` finds the first match."""
    media: tuple[str, ...] = ()
    place: int = 0
    """Index of the sample among the samples of its group that are played together."""
    watch: Watch | None = None
    on_end: Callable[[], None] | None = None
    """Called when the pool completes this request, possibly before the rest of its batch."""
    group_floor: int = -1
    """Oldest weight step among the group's tokens; engines with older weights may not run this request. -1: none."""
    session: Hashable = None
    """Key shared by all requests of a sample; the engine of the previous request has the sample's prefix cached."""
    group: Hashable = None
    """Key shared by samples with the same prompt."""
    id: str = ""
    """Name of the request at engines; unique in its pool."""
    submission: int = 0
    """Number of the `Router.submit` call that accepted the request."""
    deadline: float = math.inf
    """Deadline in the router's active time, which stops during pauses."""
    asked_at: float = 0.0
    """Active time of the call of the pool."""
    began_at: float | None = None
    """Active time of the first dispatch to an engine; None: not dispatched yet."""
    queued_s: float = 0.0
    """Seconds from the call until an engine got the request, pauses excluded."""
    generate_s: float = 0.0
    """Seconds from the first dispatch to an engine until the completion, pauses excluded."""
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    """Step of the weights that sampled each token."""
    oldest_cache: list[int] = field(default_factory=list)
    """Oldest weight step in the KV cache that each token attended to; never above the token's entry in `versions`."""
    incarnations: list[tuple[int, int]] = field(default_factory=list)
    """(index of a token, incarnation of the weights that sampled this token and the following ones), in index order.
    Extended when the request is dispatched, not for each token."""
    finish: Ending = ""
    error: str = ""
    routed_experts: RoutedExperts | None = None
    """Experts visited at each position of prompt and completion, as far as reported; None: not requested."""
    batch: tuple[PendingRequest, ...] = ()
    """Requests that were sent to the engine in the same call."""
    engine: str = ""
    """Name of the engine that runs the request; empty: none."""
    min_step: int = -1
    """Oldest weight step that the engine may report for new tokens: its step at the dispatch."""
    preempted: bool = False
    """True if the router asked the engine to abort the request, which will continue later."""
    settled: bool = False
    """True if the request was completed or cancelled; an engine may still run it."""
    dispatch_alone: bool = False
    """True if an engine refused the request's batch: it is dispatched alone next, to find the invalid request."""
    num_aborts: int = 0
    """Number of aborts by engines that the router did not ask for."""

    def add(self, delta: Delta) -> None:
        """Append the tokens of a delta; a watch may end the completion even if the engine continues to sample."""
        tokens = delta.tokens
        if tokens:
            self.tokens += tokens
            self.log_probs += delta.log_probs
            self.versions += [delta.version] * len(tokens)
            self.oldest_cache += [delta.oldest_cache] * len(tokens)
        if self.routed_experts is not None and delta.routed_experts:
            self.routed_experts.add(delta.routed_from, delta.routed_experts)
        self.finish, self.error = delta.finish, delta.error
        if self.watch is not None and tokens and self.watch(self.tokens) and self.finish in ("", "abort"):
            self.finish = "stop"

    def continuation(self, suppress_tokens: tuple[int, ...] = ()) -> GenerateRequest:
        """Return the engine's request for the remaining tokens; its prompt includes the tokens sampled so far."""
        sampling = self.sampling
        return GenerateRequest(
            self.id, self.prompt + tuple(self.tokens), self.tokens_left, sampling.temperature, sampling.top_p,
            sampling.top_k, self.seed, self.stop_tokens, suppress_tokens, self.media, self.floor,
            routed_experts=self.routed_experts is not None,
        )  # fmt: skip

    def restarted(self, batch: tuple[PendingRequest, ...]) -> PendingRequest:
        """Return the request without its sampled tokens, to run `batch` again.

        The request itself, or a settled copy if it is settled or has left the batch.
        """
        if self.settled or self.batch is not batch:
            return PendingRequest(
                self.prompt, self.max_new_tokens, self.seed, self.sampling, self.stop_tokens, media=self.media, id=self.id,
                group_floor=self.group_floor, session=self.session, group=self.group, settled=True,
                routed_experts=None if self.routed_experts is None else RoutedExperts(self.routed_experts.routing),
            )  # fmt: skip
        for sampled in (self.tokens, self.log_probs, self.versions, self.oldest_cache, self.incarnations):
            sampled.clear()
        self.routed_experts = None if self.routed_experts is None else RoutedExperts(self.routed_experts.routing)
        self.finish, self.error = "", ""
        return self

    @property
    def floor(self) -> int:
        """Oldest weight step that may continue the request: the group's floor, else the oldest step of its tokens."""
        return self.group_floor if self.group_floor >= 0 else min(self.versions, default=-1)

    @property
    def tokens_left(self) -> int:
        """Number of tokens that may still be sampled."""
        return self.max_new_tokens - len(self.tokens)

    def newest(self, end: int) -> list[tuple[int, int]]:
        """Return (incarnation, newest step) of each run of tokens of one incarnation among the first `end` tokens."""
        if len(self.incarnations) == 1 and end:
            return [(self.incarnations[0][1], max(self.versions[:end]))]
        stops = [min(start, end) for start, _ in self.incarnations[1:]] + [end]
        runs = zip(self.incarnations, stops, strict=False)  # `incarnations` is empty if no engine got the request
        return [(incarnation, max(self.versions[start:stop])) for (start, incarnation), stop in runs if start < stop]


Generate: TypeAlias = Callable[[Sequence[PendingRequest]], Awaitable[None]]
"""A function that samples requests as one batch, and returns when all have ended."""


def stop_end(tokens: Sequence[int], stop: tuple[str, ...], decode: Callable[[tuple[int, ...]], str]) -> int | None:
    """Return the number of tokens up to the end of the first stop text; None if there is no stop text.

    Engines see token ids only, so they may sample past a stop text, as a rule by a few tokens. So the search goes back
    from the end in growing steps, and its time is in proportion to the completion's length.
    """

    def has_stop(count: int) -> bool:
        decoded = decode(tuple(tokens[:count]))
        return any(text in decoded for text in stop)

    end, step = len(tokens), 1
    if not stop or not has_stop(end):
        return None
    while end > step and has_stop(end - step):
        end, step = end - step, 2 * step
    counts = range(max(0, end - step) + 1, end + 1)
    return counts[bisect_left(counts, True, key=has_stop)]


def watch_for(stop: tuple[str, ...], decode: Callable[[tuple[int, ...]], str]) -> Watch | None:
    """Return a watch that ends a completion at a stop text, since later tokens are cut off."""
    if not stop:
        return None
    seen = 0
    max_tokens = max(len(text.encode()) for text in stop)
    """Most tokens that a stop text can span: each visible token holds at least one byte."""

    def watch(tokens: Sequence[int]) -> bool:
        nonlocal seen
        text = decode(tuple(tokens[max(0, seen - max_tokens) :]))
        seen = len(tokens)
        return any(wanted in text for wanted in stop)

    return watch


_KNOWN, _HOLE = b"\1", b"\0"


class RoutedExperts:
    """The MoE experts visited at each position of a sequence, from position 0.

    Invariants:
    - The first report of a position is kept: the token was sampled with those experts, and another engine or newer
      weights may compute different ones.
    - A position without a report is a hole, filled with zeros; a later report may fill it.
    """

    __slots__ = ("_known", "_values", "routing", "width")

    def __init__(self, routing: Routing) -> None:
        self.routing, self.width = routing, routing.width
        self._values, self._known = bytearray(), bytearray()

    def __len__(self) -> int:
        """Return the number of positions up to the last reported one."""
        return len(self._known)

    def add(self, start: int, values: bytes) -> None:
        """Record the experts of consecutive positions from `start`; positions with a report keep their first experts."""
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
        """Return why reported experts are invalid for a sequence of `length` tokens; empty: valid."""
        count, over = divmod(len(values), self.width)
        if over or start < 0 or start + count > length:
            return (
                f"{len(values)} bytes of routed experts from position {start}; want {self.width} bytes per position, within "
                f"{length} tokens"
            )
        most = int(_array(values, self.routing).max(initial=0))
        return f"routed to expert {most} of {self.routing.experts} experts" if most >= self.routing.experts else ""

    def between(self, start: int, stop: int) -> tuple[bytes, bytes]:
        """Return (experts, known) of the positions `start` to `stop`; `known` has one byte a position, 0 for a hole."""
        values = bytes(self._values[start * self.width : stop * self.width])
        known = bytes(self._known[start:stop])
        return values.ljust((stop - start) * self.width, _HOLE), known.ljust(stop - start, _HOLE)


def filled(node: Node, start: int, experts: RoutedExperts) -> tuple[bytes, bytes] | None:
    """Return a node's (routed_experts, routed_valid) with its holes filled from `experts`; None if it fills no hole.

    `start` is the position of the node's first token in the sequence.
    """
    if node.routed_valid and _HOLE not in node.routed_valid:
        return None
    values_here, known = experts.between(start, start + len(node.tokens))
    if not node.routed_valid:
        return (values_here, known) if _KNOWN in known else None
    values, have, width = bytearray(node.routed_experts), bytearray(node.routed_valid), experts.width
    fresh = [at for at, (mine, theirs) in enumerate(zip(have, known, strict=True)) if theirs and not mine]
    for at in fresh:
        values[at * width : (at + 1) * width] = values_here[at * width : (at + 1) * width]
        have[at] = 1
    return (bytes(values), bytes(have)) if fresh else None


def routed_columns(paths: Sequence[Path], routing: Routing, lengths: np.ndarray) -> dict[str, Ragged]:
    """Return the columns `routed_experts` and `routed_valid` of the rows along `paths`, with `lengths` tokens each."""
    import numpy as np

    nodes = [node for path in paths for node, _ in path]
    values = b"".join(node.routed_experts or bytes(len(node.tokens) * routing.width) for node in nodes)
    known = b"".join(node.routed_valid or bytes(len(node.tokens)) for node in nodes)
    return {
        "routed_experts": Ragged(_array(values, routing), lengths),
        "routed_valid": Ragged(np.frombuffer(known, np.uint8), lengths),
    }


def _array(values: bytes, routing: Routing) -> np.ndarray:
    """Return the experts in `values` as [positions, layers, top_k]."""
    import numpy as np

    experts = np.frombuffer(values, np.dtype(routing.dtype).newbyteorder("<"))
    return experts.astype(routing.dtype, copy=False).reshape(-1, routing.layers, routing.top_k)
