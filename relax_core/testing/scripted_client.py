# SPDX-License-Identifier: Apache-2.0
"""A client of an engine pool with scripted answers, for the conformance tests of rewards that call an engine.

The suite supplies the answer to each prompt. All tokens have the same log-prob.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from relax_core.api.engine import Generated, Prompt
from relax_core.api.task import Message

BYTES = 256
"""Size of the vocabulary: a token is a byte."""


class ScriptedClient:
    """`api.engine.ModelClient` with scripted answers."""

    def __init__(self, name: str, answer: Callable[[str], str]) -> None:
        self.name, self._answer = name, answer

    async def generate(
        self, prompt: Prompt, max_new_tokens: int = 256, *, temperature: float = 0.0, top_p: float = 1.0, seed: int = 0,
        stop: tuple[str, ...] = (), timeout_s: float = 0.0,
    ) -> Generated:  # fmt: skip
        said = self._answer(_text(prompt))
        tokens = tuple(said.encode())
        cut = len(tokens) > max_new_tokens
        shown = bytes(tokens[:max_new_tokens]).decode(errors="replace") if cut else said
        tokens = tokens[:max_new_tokens]
        return Generated(shown, tokens, (-math.log(BYTES),) * len(tokens), "length" if cut else "stop")

    async def score(
        self, prompt: Prompt, completions: Sequence[str | Sequence[int]], *, temperature: float = 1.0,
        timeout_s: float = 0.0,
    ) -> tuple[tuple[float, ...], ...]:  # fmt: skip
        lengths = [len(one.encode()) if isinstance(one, str) else len(one) for one in completions]
        return tuple((-math.log(BYTES),) * length for length in lengths)


def _text(prompt: Prompt) -> str:
    if isinstance(prompt, str):
        return prompt
    if all(isinstance(part, int) for part in prompt):
        return bytes(part % BYTES for part in prompt if isinstance(part, int)).decode(errors="replace")
    return "\n".join(part.text for part in prompt if isinstance(part, Message))
