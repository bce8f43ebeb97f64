# SPDX-License-Identifier: Apache-2.0
"""What an episode asks of the policy and gets back. Engines and routing are behind `Generate`; episodes never see them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeAlias

from relax_core.api.engine import FinishReason


@dataclass(frozen=True, slots=True)
class GenerateCall:
    """One turn to sample."""

    tokens: tuple[int, ...]
    """The whole branch so far."""
    max_new_tokens: int
    seed: int
    stop_tokens: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    """Texts that end the turn, for whoever serves the call to watch for."""
    media: tuple[str, ...] = ()
    floor: int = -1
    """Oldest step among the sample's tokens so far; -1 before the first."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled turn; tuples are [tokens]."""

    tokens: tuple[int, ...]
    log_probs: tuple[float, ...]
    versions: tuple[int, ...]
    """Step of the weights that sampled each token."""
    oldest_cache: tuple[int, ...] = ()
    """Oldest step in the cache each token attended to; empty where caches are dropped at a publish."""
    finish: FinishReason = "stop"
    error: str = ""


Generate: TypeAlias = Callable[[GenerateCall], Awaitable[Completion]]
