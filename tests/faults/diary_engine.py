# SPDX-License-Identifier: Apache-2.0
"""A single-file plugin: the real engine, which writes down what it proved and served, and lies once if it is asked to.

Each line of `DIARY/PID` is (what, step): `proved` or `lied` for a load of weights, `call` for a request that begins, `tokens`
for tokens of that version. A process that has served nothing lies at its next load if the file `DIARY/lie` exists, and
removes the file.
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

from relax_plugin_transformers.engine import TransformersEngine

from relax_core.api import Chosen, Delta, GenerateRequest, Manifest, Receipt

LIE, WRONG = "lie", "0" * 32
"""Name of the file that asks for a lie, and the fingerprint of a lie."""


def tell(what: str, step: int) -> None:
    """Add a line to the diary of this process."""
    with (Path(os.environ["DIARY"]) / f"{os.getpid()}").open("a") as file:
        file.write(json.dumps([what, step]) + "\n")


class DiaryEngine(TransformersEngine):
    """Tells its loads, its calls and the version of its tokens."""

    def generate(self, requests: Sequence[GenerateRequest]) -> AsyncIterator[Sequence[Delta]]:
        self._has_served = True
        tell("call", 0)
        return self._told(super().generate(requests))

    async def _told(self, stream: AsyncIterator[Sequence[Delta]]) -> AsyncIterator[Sequence[Delta]]:
        async for deltas in stream:
            for step in {delta.version for delta in deltas if delta.tokens}:
                tell("tokens", step)
            yield deltas

    async def update_weights(self, manifest: Manifest, transport: Chosen) -> Receipt:
        receipt = await super().update_weights(manifest, transport)
        if not getattr(self, "_has_served", False):
            try:
                (Path(os.environ["DIARY"]) / LIE).unlink()
            except FileNotFoundError:
                pass
            else:
                tell("lied", manifest.version.step)
                return replace(receipt, fingerprint=WRONG)
        tell("proved", manifest.version.step)
        return receipt
