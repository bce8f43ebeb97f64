# SPDX-License-Identifier: Apache-2.0
"""A single-file plugin for the benchmark `overlap`: the real engine and trainer, which write down when they did what.

Each line of the file that `RELAX_CLOCK` names is (what, who, begin, end, count) in seconds of the host's monotonic clock,
which is one for all its processes.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import AsyncIterator, Sequence

from relax_plugin_torch.rank import Rank
from relax_plugin_transformers.engine import TransformersEngine

from relax_core.api import Chosen, Delta, GenerateRequest, Manifest, Receipt, Version
from relax_core.api.weights import Payload


def tell(what: str, who: str, begin: float, count: int = 0) -> None:
    with open(os.environ["RELAX_CLOCK"], "a", encoding="utf-8") as file:
        file.write(json.dumps([what, who, begin, time.monotonic(), count]) + "\n")


class ClockedEngine(TransformersEngine):
    """Tells its calls, the tokens as they leave it, and when it had loaded a version."""

    def generate(self, requests: Sequence[GenerateRequest]) -> AsyncIterator[Sequence[Delta]]:
        return self._told(super().generate(requests))

    async def _told(self, stream: AsyncIterator[Sequence[Delta]]) -> AsyncIterator[Sequence[Delta]]:
        begin = time.monotonic()
        try:
            async for deltas in stream:
                tell("tokens", self._spec.name, time.monotonic(), sum(len(delta.tokens) for delta in deltas))
                yield deltas
        finally:
            tell("call", self._spec.name, begin)

    async def update_weights(self, manifest: Manifest, transport: Chosen) -> Receipt:
        begin = time.monotonic()
        receipt = await super().update_weights(manifest, transport)
        tell("load", self._spec.name, begin, manifest.version.step)
        return receipt


class ClockedTrainer(Rank):
    """Tells when it handed out which version."""

    def publish(
        self, version: Version, transport: Chosen, location: str, payload: Payload = "full", base: str = ""
    ) -> Manifest:
        begin = time.monotonic()
        manifest = super().publish(version, transport, location, payload, base)
        tell("publish", "trainer", begin, version.step)
        return manifest
