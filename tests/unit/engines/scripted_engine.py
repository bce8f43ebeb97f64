# SPDX-License-Identifier: Apache-2.0
"""Engines whose next token is the last one plus one: what the pool joins together can be read off. They run in a child.

`ScriptedEngine` can do what a pool may ask for, `AbortingEngine` can't be paused nor updated while it samples,
`DrainingEngine` can't even be told to let go. While a file `GATE` names is not there, no long request samples its last
tokens and nothing slow ends: what a test does in the middle of it is in the middle, however slow the machine.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

from relax_core.api import Delta, EngineSpec, GenerateRequest, Health, Manifest, Receipt, Version
from relax_core.api.engine import FinishReason

TOKEN_S = 0.01
REFUSED = 999
LONG, HELD_BACK = 40, 10
"""Tokens of a long request, and how many of them wait for the gate."""
GATE = "RELAX_TEST_GATE"
"""The variable with the path of the file; without it the gate is open."""


def gate_is_open() -> bool:
    return os.path.exists(os.environ.get(GATE, "/"))


async def gate_opens() -> None:
    while not gate_is_open():
        await asyncio.sleep(TOKEN_S)


class DrainingEngine:
    """The part of `api.Engine` that a pool calls; requests run to their end, and updates between them."""

    component: Any = None
    build: Any = None
    in_flight = False

    async def start(self, spec: EngineSpec) -> dict[str, Any]:
        self._name, self._step = spec.name, 0
        self._left: dict[str, int] = {}
        self._goes = asyncio.Event()
        self._goes.set()
        return {"fingerprint": "one", "max_context": 64}

    async def generate(self, requests: Sequence[GenerateRequest]) -> AsyncIterator[list[Delta]]:
        if any(REFUSED in request.tokens for request in requests):
            raise ValueError(f"token {REFUSED} is outside the vocabulary")
        if any(request.floor > self._step for request in requests):
            raise ValueError(f"floor above {self._step}")
        last = {request.id: request.tokens[-1] for request in requests}
        self._left.update((request.id, request.max_new_tokens) for request in requests)
        waiting = {request.id for request in requests if request.max_new_tokens > LONG // 2}
        while last:
            await asyncio.sleep(TOKEN_S)
            await self._goes.wait()
            held = {
                name for name in last if name in waiting and self._left.get(name) == HELD_BACK and not gate_is_open()
            }
            deltas = [self._delta(name, last) for name in list(last) if name not in held]
            yield deltas
            for delta in deltas:
                if delta.finish:
                    del last[delta.id]

    def _delta(self, name: str, last: dict[str, int]) -> Delta:
        if name not in self._left:
            return Delta(name, (), (), self._step, self._step, "abort")
        last[name] += 1
        self._left[name] -= 1
        finish: FinishReason = "" if self._left[name] else "length"
        if finish:
            del self._left[name]
        return Delta(name, (last[name],), (-0.5,), self._step, self._step, finish)

    async def score(self, sequences: Sequence[Sequence[int]], temperature: float = 1.0) -> list[list[float]]:
        """Each token's log-prob is its id, negative and by the temperature."""
        await asyncio.sleep(TOKEN_S * len(sequences))
        if any(REFUSED in sequence for sequence in sequences):
            raise ValueError(f"token {REFUSED} is outside the vocabulary")
        return [[0.0, *(-token / temperature for token in sequence[1:])] for sequence in sequences]

    async def update_weights(self, manifest: Manifest, transport: Any) -> Receipt:
        if self._left and not self.in_flight:
            raise RuntimeError(f"updated while it runs {sorted(self._left)}")
        self._step = manifest.version.step
        return Receipt(self._name, manifest.version, "wire", manifest.wire_fingerprint)

    async def health(self) -> Health:
        return Health(True, Version("actor", 0, self._step))

    async def pause(self) -> None:
        raise NotImplementedError

    async def resume(self) -> None:
        raise NotImplementedError

    async def abort(self, ids: Sequence[str]) -> None:
        raise NotImplementedError


class AbortingEngine(DrainingEngine):
    """Lets requests go when it is told to."""

    async def abort(self, ids: Sequence[str]) -> None:
        for name in ids:
            self._left.pop(name, None)


class ScriptedEngine(AbortingEngine):
    """Pauses, and takes weights between two tokens."""

    in_flight = True

    async def pause(self) -> None:
        self._goes.clear()

    async def resume(self) -> None:
        self._goes.set()


class OffloadingEngine(ScriptedEngine):
    """Takes its time to free its memory."""

    async def offload(self, parts: Sequence[str]) -> int:
        await gate_opens()
        return len(parts)


class HangingEngine(ScriptedEngine):
    """Takes weights for ever."""

    async def update_weights(self, manifest: Manifest, transport: Any) -> Receipt:
        await asyncio.Event().wait()
        raise AssertionError("it never ends")


class SlowEngine(ScriptedEngine):
    """The second of a pool samples on while it is slow to take weights of another incarnation."""

    async def update_weights(self, manifest: Manifest, transport: Any) -> Receipt:
        if manifest.version.incarnation and self._name == "engine-1":
            await gate_opens()
        return await super().update_weights(manifest, transport)


class LyingEngine(ScriptedEngine):
    """Has something else than it was given."""

    async def update_weights(self, manifest: Manifest, transport: Any) -> Receipt:
        return Receipt(self._name, manifest.version, "wire", "something else")


class FalseEngine(ScriptedEngine):
    """The first of a pool gives a log-prob too few."""

    def _delta(self, name: str, last: dict[str, int]) -> Delta:
        delta = super()._delta(name, last)
        return replace(delta, log_probs=()) if self._name == "engine-0" else delta

    async def score(self, sequences: Sequence[Sequence[int]], temperature: float = 1.0) -> list[list[float]]:
        found = await super().score(sequences, temperature)
        return [one[:-1] for one in found] if self._name == "engine-0" else found


class OddEngine(ScriptedEngine):
    """Each of a pool has another vocabulary."""

    async def start(self, spec: EngineSpec) -> dict[str, Any]:
        return {**await super().start(spec), "vocab_size": 1000 + int(spec.name[-1])}


class SickEngine(ScriptedEngine):
    """Starts, and is not well."""

    async def health(self) -> Health:
        return Health(False, Version("actor", 0, self._step), facts={"failure": "its device fell off the bus"})


class DyingEngine(ScriptedEngine):
    """The process ends while the model is loaded, as one does that runs out of memory."""

    async def start(self, spec: EngineSpec) -> dict[str, Any]:
        os._exit(9)
