# SPDX-License-Identifier: Apache-2.0
"""A single-file plugin: a trainer whose weights are the list of samples that made them, and an engine that names its own.

Both tell the witness of their start. The engine's tokens say which incarnation sampled them; it can be made to lie.
"""

from __future__ import annotations

import asyncio
import errno
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, ClassVar

from relax_core.api import (
    Capabilities,
    Chosen,
    Chunk,
    Delta,
    GenerateRequest,
    Manifest,
    Receipt,
    TrainerSpec,
    UpdateOutcome,
    UpdateResult,
    Version,
)
from relax_core.api.batch import AttemptId
from relax_core.api.weights import Payload
from tests.chaos.witness import Witness
from tests.unit.roles import scripted_components as scripted

FIRST_TOKEN = 0x4E00
"""Token of incarnation 0; the next ones follow it."""


class WitnessedTrainer(scripted.ScriptedTrainer):
    """Refuses rows that a real one must refuse; its checkpoints hold the attempts that it learned from, by step."""

    _witness: Witness
    """Of the start whose worker it is in, which sets it."""

    def start(self, spec: TrainerSpec) -> Mapping[str, Any]:
        self._open = list[AttemptId]()
        self._content: dict[int, list[AttemptId]] = {}
        return super().start(spec)

    def begin_step(self, version: Version) -> None:
        super().begin_step(version)
        self._content.pop(version.step + 1, None)  # a step that was aborted before its first update

    def begin_update(self, denominators: Mapping[str, float]) -> None:
        super().begin_update(denominators)
        self._open = []

    async def accumulate(self, chunk: Chunk, last: bool) -> None:  # type: ignore[override]
        await super().accumulate(chunk, last)
        columns = chunk.rows.columns
        for row, tokens, mask, versions in zip(
            chunk.rows.ids,
            *(columns[name].rows() for name in ("tokens", "loss_mask", "weight_versions")),
            strict=True,
        ):
            self._open.append(row.attempt_id)
            if self._spec.role == "actor":
                for token, trained, version in zip(tokens.tolist(), mask.tolist(), versions.tolist(), strict=True):
                    if trained and token >= FIRST_TOKEN:
                        self._witness.check_token(token - FIRST_TOKEN, version, self._begun)

    def finish_update(self, denominators: Mapping[str, float]) -> UpdateResult:
        if self._witness.not_finite and self._spec.role == "actor":
            self._witness.not_finite -= 1
            self._content.setdefault(self._begun + 1, []).extend(self._open)  # where it is skipped, they are spent
            return UpdateResult(UpdateOutcome.NOT_FINITE, grad_norm=float("nan"))
        result = super().finish_update(denominators)
        if result.outcome is UpdateOutcome.APPLIED:
            self._content.setdefault(self._begun + 1, []).extend(self._open)
        return result

    def abort_update(self) -> None:
        super().abort_update()
        self._open = []

    async def publish(  # type: ignore[override]
        self, version: Version, transport: Chosen, location: str, payload: Payload = "full", base: str = ""
    ) -> Manifest:
        self._check(version)
        if self._spec.role == "actor":
            self._witness.published.add(version.incarnation)
        made = await super().publish(version, transport, location, payload, base)
        named = f"{version.incarnation}.{version.step}"
        tensors = tuple(replace(tensor, fingerprint=named) for tensor in made.tensors)
        return replace(made, tensors=tensors, fingerprint=named)

    def save(self, directory: str) -> None:
        if self._witness.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        super().save(directory)
        content = {step: sorted(map(tuple, found)) for step, found in self._content.items()}
        (Path(directory) / "content.json").write_text(json.dumps(content))

    def load(self, directory: str) -> None:
        super().load(directory)
        found = json.loads((Path(directory) / "content.json").read_text())
        self._content = {int(step): [AttemptId(*one) for one in content] for step, content in found.items()}

    def export(self, directory: str) -> None:
        self._check(Version("actor", self._witness.begun[-1].incarnation, max(self._witness.lineage, default=0)))

    def _check(self, version: Version) -> None:
        if self._spec.role == "actor":
            self._witness.check_weights(version, {step: frozenset(found) for step, found in self._content.items()})


class WitnessedEngine(scripted.ScriptedEngine):
    """Samples the token of its weights' incarnation, and tells a lie where it is made to."""

    _witness: Witness

    async def generate(self, requests: Sequence[GenerateRequest]) -> AsyncIterator[list[Delta]]:
        left = {request.id: self._length(request) for request in requests}
        self._running.update(left)
        try:
            while left:
                await asyncio.sleep(self.options.token_s)
                version, deltas = self._version, []
                for name in list(left):
                    if name in self._unwanted:
                        del left[name]
                        self._unwanted.discard(name)
                        deltas.append(Delta(name, (), (), version.step, version.step, "abort"))
                        continue
                    left[name] -= 1
                    finish = "" if left[name] else "stop"
                    token = FIRST_TOKEN + version.incarnation if left[name] else scripted.END
                    deltas.append(Delta(name, (token,), (-0.5,), version.step, version.step, finish))
                    if finish:
                        del left[name]
                self._running.difference_update(delta.id for delta in deltas if delta.finish)
                yield self._told(deltas)
        finally:
            self._running.difference_update(left)

    def _told(self, deltas: list[Delta]) -> list[Delta]:
        """Tell the truth, but for a lie that is due."""
        lies = self._witness.lies
        for lie in lies:
            if lie in GENERATED and deltas:
                lies.remove(lie)
                return [GENERATED[lie](delta) for delta in deltas]
        return deltas

    def _length(self, request: GenerateRequest) -> int:
        random = Random(request.seed)
        length = random.randint(1, self.options.longest)
        if self.options.straggler and random.random() < self.options.straggles:
            length = self.options.straggler
        sampled = sum(token >= FIRST_TOKEN for token in request.tokens)
        return min(max(1, length - sampled), request.max_new_tokens)

    async def update_weights(self, manifest: Manifest, transport: Chosen) -> Receipt:
        lies = self._witness.lies
        lie = next((lie for lie in lies if lie in RECEIPTS), None)
        if lie is None:
            return await super().update_weights(manifest, transport)
        lies.remove(lie)
        await asyncio.sleep(self.options.update_s)
        return RECEIPTS[lie](self._name, manifest)  # it keeps the weights that it has


class WitnessedDrainingEngine(WitnessedEngine):
    """Must let everything go before it takes weights."""

    capabilities: ClassVar[Capabilities] = Capabilities(seeds=True, transports=frozenset({"scripted-transport"}))

    async def update_weights(self, manifest: Manifest, transport: Chosen) -> Receipt:
        if self._running:
            self._witness.wrong(f"{self._name} takes weights while it runs {sorted(self._running)}")
        return await super().update_weights(manifest, transport)


GENERATED = {
    "a version of the future": lambda delta: replace(delta, version=delta.version + 7),
    "an answer that nobody asked for": lambda delta: replace(delta, id=f"{delta.id}-other"),
    "tokens without log-probs": lambda delta: replace(delta, log_probs=()),
    "tokens without end": lambda delta: replace(delta, tokens=delta.tokens * 99, log_probs=delta.log_probs * 99),
}
RECEIPTS = {
    "a receipt of other bytes": lambda name, manifest: Receipt(name, manifest.version, "wire", "other bytes"),
    "a receipt of the weights before": lambda name, manifest: Receipt(
        name, manifest.version._replace(step=manifest.version.step - 1), "wire", manifest.wire_fingerprint
    ),
    "a receipt of another engine": lambda name, manifest: Receipt(
        f"{name}-other", manifest.version, "wire", manifest.wire_fingerprint
    ),
    "a receipt of an earlier incarnation": lambda name, manifest: Receipt(
        name, manifest.version._replace(incarnation=-1), "wire", manifest.wire_fingerprint
    ),
}
"""Each must be noticed, since the engine has not the weights that it should."""
