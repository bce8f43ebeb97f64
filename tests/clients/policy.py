# SPDX-License-Identifier: Apache-2.0
"""A policy that says turns in tokens, and keeps what it was asked."""

from __future__ import annotations

from collections.abc import Iterable

from relax_core.engines.requests import PendingRequest
from tests.unit.sampling.toy_policy import Completion


class Says:
    """A policy of turns in tokens. `calls` has the prompt and the answer of each request."""

    def __init__(self, turns: Iterable[tuple[int, ...]], stops: tuple[int, ...]) -> None:
        self._turns, self._stops = list(turns), stops
        self.calls: list[tuple[tuple[int, ...], tuple[int, ...]]] = []

    async def __call__(self, call: PendingRequest) -> Completion:
        tokens = self._turns.pop(0)
        ends = (end for end in range(len(tokens)) if call.watch is not None and call.watch(tokens[:end]))
        tokens = tokens[: next(ends, None)]  # ends at a stop text
        self.calls.append((call.prompt, tokens))
        versions = (1,) * len(tokens)
        finish = "stop" if tokens[-1] in self._stops else "length"
        return Completion(tokens, (-0.5,) * len(tokens), versions, versions, finish)
