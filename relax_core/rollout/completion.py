# SPDX-License-Identifier: Apache-2.0
"""What an episode asks of the policy and gets back. Engines and routing are behind `Generate`; episodes never see them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import Literal, NamedTuple, TypeAlias

from relax_core.api.engine import FinishReason
from relax_core.rollout.routes import Routes

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
