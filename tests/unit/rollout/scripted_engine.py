# SPDX-License-Identifier: Apache-2.0
"""An engine whose next token is its last one plus one: what the pool joins together can be read off. Runs in a child."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

from relax_core.api import Delta, EngineSpec, GenerateRequest, Manifest, Receipt

TOKEN_S = 0.01
REFUSED = 999


class ScriptedEngine:
    """The part of `api.Engine` that a pool calls."""

    component: Any = None
    build: Any = None

    async def start(self, spec: EngineSpec) -> dict[str, Any]:
        self._name, self._step = spec.name, 0
        return {"fingerprint": "one", "max_context": 64}

    async def generate(self, requests: Sequence[GenerateRequest]) -> AsyncIterator[list[Delta]]:
        if any(REFUSED in request.tokens for request in requests):
            raise ValueError(f"token {REFUSED} is outside the vocabulary")
        last = {request.id: request.tokens[-1] for request in requests}
        left = {request.id: request.max_new_tokens for request in requests}
        while left:
            await asyncio.sleep(TOKEN_S)
            deltas = []
            for name in list(left):
                last[name] += 1
                left[name] -= 1
                deltas.append(
                    Delta(name, (last[name],), (-0.5,), self._step, self._step, "" if left[name] else "length")
                )
                if not left[name]:
                    del left[name]
            yield deltas

    async def update_weights(self, manifest: Manifest, transport: Any) -> Receipt:
        self._step = manifest.version.step
        return Receipt(self._name, manifest.version, "resident", manifest.fingerprint)
