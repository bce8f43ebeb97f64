# SPDX-License-Identifier: Apache-2.0
"""A hand on a pool of engines beside the policy's: how rewards and environments ask a judge model.

They say which pools they need (`needs_engines`) and find a hand on each in `self.engines`, wherever their process is.
Pools keep their weights; who reaches the policy's own engines is the session of an environment that drives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, Protocol, TypeAlias

from relax_core.api.task import Message

Prompt: TypeAlias = "str | Sequence[Message] | Sequence[int]"
"""Messages are rendered by the pool's chat template; text goes in as it stands; ids are the pool's own."""


@dataclass(frozen=True, slots=True)
class Generated:
    """One continuation; tuples are [tokens]."""

    text: str
    """Without the tokens that end a turn."""
    tokens: tuple[int, ...]
    log_probs: tuple[float, ...]
    finish: Literal["stop", "length"] = "stop"


class EngineHand(Protocol):
    """One pool, from `[[engines]]`. Requests of a dead engine go on elsewhere in the pool.

    Raises ValueError for what no engine could run (a prompt over the context, an id outside the vocabulary) and
    InfrastructureError where the pool can't answer; its DeadlineExceeded after `timeout_s`, 0: that of the pool. Leave
    the latter alone: the core turns them into the sample's outcome, never into a score.
    """

    name: str

    async def generate(
        self, prompt: Prompt, max_new_tokens: int = 256, *, temperature: float = 0.0, top_p: float = 1.0, seed: int = 0,
        stop: tuple[str, ...] = (), timeout_s: float = 0.0,
    ) -> Generated:  # fmt: skip
        """Continue a prompt; temperature 0 is greedy. Of the same seed and prompt the same, where the engine has seeds."""
        ...

    async def score(
        self, prompt: Prompt, completions: Sequence[str | Sequence[int]], *, temperature: float = 1.0,
        timeout_s: float = 0.0,
    ) -> tuple[tuple[float, ...], ...]:  # fmt: skip
        """Of each completion, the log-prob of each of its tokens behind the prompt, of logits / temperature. The very first
        token of an empty prompt has 0."""
        ...


NO_ENGINES: Mapping[str, EngineHand] = MappingProxyType({})
