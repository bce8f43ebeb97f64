# SPDX-License-Identifier: Apache-2.0
"""Calls of an agent to engine pools beside the policy's, by their names as models: answered, counted, and never trained."""

from __future__ import annotations

import asyncio
import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

from relax_core.api import Generated, InfrastructureError, ModelClient
from relax_plugin_agents.history import call_key
from relax_plugin_agents.model_request import ModelRequest, Refused

MAX_NEW_TOKENS = 1024
"""Most tokens of an answer, where the request names no limit."""
MAX_TEMPERATURE = 2.0


class SideCalls:
    """The side calls of one sample: `asked -> answered | failed`; `close` ends what is still asked.

    Invariants:
    - An answer is drawn by its content: the pool, the request, and how many equal requests came before it in the sample.
    - A pool that could not be asked is remembered in `failure`: whatever the agent makes of it, it is no fault of the policy's.
    """

    def __init__(self, clients: Mapping[str, ModelClient]) -> None:
        self.clients = clients
        self.failure: InfrastructureError | None = None
        self._answers: defaultdict[str, list[asyncio.Task[Generated]]] = defaultdict(list)
        """By the content of their request, in order."""
        self._counts: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()

    def ask(self, name: str, request: ModelRequest, body: Mapping[str, Any], again: bool) -> asyncio.Task[Generated]:
        """Begin a call, or find the one that a client asks for again. Raises Refused."""
        if request.tools:
            raise Refused("tools", f"{name} is a pool beside the policy's, which answers in text; leave them out")
        temperature = _number(body, "temperature", 1.0, 0.0, MAX_TEMPERATURE)
        top_p = _number(body, "top_p", 1.0, 0.0, 1.0) or 1.0
        key = f"{name}/{call_key(request)}/{temperature:g}/{top_p:g}"
        equal = self._answers[key]
        if not (again and equal):
            seed = int.from_bytes(blake2b(f"{key}/{len(equal)}".encode(), digest_size=4).digest(), "big") >> 1
            self._counts[name] += 1
            equal.append(asyncio.create_task(self._generate(name, request, temperature, top_p, seed)))
        return equal[-1]

    async def _generate(
        self, name: str, request: ModelRequest, temperature: float, top_p: float, seed: int
    ) -> Generated:
        try:
            answer = await self.clients[name].generate(
                request.messages, request.max_new_tokens or MAX_NEW_TOKENS, temperature=temperature, top_p=top_p, seed=seed,
                stop=request.stop,
            )  # fmt: skip
        except InfrastructureError as error:
            self.failure = self.failure or error
            raise
        except ValueError as error:  # no engine could run it
            raise Refused("messages", str(error)) from error
        self._tokens[name] += len(answer.tokens)
        return answer

    def summary(self) -> dict[str, Any]:
        """Describe the calls by pool, as JSON; empty where there were none."""
        return {name: {"calls": count, "tokens": self._tokens[name]} for name, count in sorted(self._counts.items())}

    async def close(self) -> None:
        tasks = [task for equal in self._answers.values() for task in equal]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _number(body: Mapping[str, Any], field: str, default: float, low: float, high: float) -> float:
    value = body.get(field)
    if value is None:
        return default
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not math.isfinite(value)
        or not low <= value <= high
    ):
        raise Refused(field, f"got {str(value)[:80]}; it is a number from {low:g} to {high:g}")
    return float(value)
