# SPDX-License-Identifier: Apache-2.0
"""An agent's calls to auxiliary pools, chosen by model name: answered and counted, but never trained."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

from relax_core.api import Generated, InfrastructureError, ModelClient
from relax_plugin_agents.history import call_key, check_media
from relax_plugin_agents.model_request import ModelRequest, Refused

MAX_NEW_TOKENS = 1024
"""Maximum number of tokens of an answer if the request sets no limit."""
MAX_TEMPERATURE = 2.0


class SideCalls:
    """The side calls of one sample: `asked -> answered | failed`; `close` cancels pending calls.

    Invariants:
    - The seed of an answer depends only on the pool, the request, and the number of equal earlier requests.
    - `failure` keeps the first failure of a pool, so that the environment can raise it even if the agent caught it.
    """

    def __init__(self, clients: Mapping[str, ModelClient]) -> None:
        self.clients = clients
        self.failure: InfrastructureError | None = None
        self._answers: defaultdict[str, list[asyncio.Task[Generated]]] = defaultdict(list)
        """Answers by a key of pool, request and sampling settings, in order of arrival."""
        self._counts: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()

    def ask(self, name: str, request: ModelRequest, body: Mapping[str, Any], again: bool) -> asyncio.Task[Generated]:
        """Start a call to the pool `name`, or return the newest equal call if `again` marks a retry. Raises Refused."""
        check_media(request.messages, ())
        if request.tools:
            raise Refused("tools", f"{name} is an auxiliary pool, which answers in text; leave tools out")
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
        except ValueError as error:  # no engine of the pool can run the request
            raise Refused("messages", str(error)) from error
        self._tokens[name] += len(answer.tokens)
        return answer

    def summary(self) -> dict[str, Any]:
        """Return the number of calls and of sampled tokens by pool; empty if no pool was called."""
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
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise Refused(field, f"got {str(value)[:80]}; send a number from {low:g} to {high:g}")
    return float(value)
