# SPDX-License-Identifier: Apache-2.0
"""A single-file plugin for the overhead benchmark: an engine, a trainer and a transport whose work takes a fixed time.

A request takes `generate_s` from when it is asked, a training step `train_s` in all, whatever its number of rows.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from relax_core.api import (
    Capabilities,
    Chosen,
    Chunk,
    ChunkPlan,
    Delta,
    Engine,
    EngineSpec,
    GenerateRequest,
    Health,
    Manifest,
    Options,
    Ragged,
    Receipt,
    RowBatch,
    TensorInfo,
    Trainer,
    TrainerSpec,
    UpdateOutcome,
    UpdateResult,
    Version,
    WeightTransport,
)
from relax_core.api.weights import Payload, combined_fingerprint


class MetronomeTransport(WeightTransport):
    """Moves nothing."""

    payloads: ClassVar[frozenset[str]] = frozenset({"full"})

    def send(self, version: Version, payload: Payload, base: str, tensors: Any, location: str) -> Manifest:
        return _manifest(version)

    def receive(self, manifest: Manifest, resident: Any = None) -> Iterator[Any]:
        return iter(())

    def release(self, manifest: Manifest) -> None:
        """Nothing was kept."""


class EngineOptions(Options):
    generate_s: float = 1.0
    """From when a request is asked to its answer."""
    tokens: int = 8
    """Of an answer."""
    parts: int = 1
    """In how many an answer comes."""


class MetronomeEngine(Engine[EngineOptions]):
    """Answers after its time, all requests side by side."""

    capabilities: ClassVar[Capabilities] = Capabilities(
        seeds=True, offloads=frozenset({"weights", "kv"}), transports=frozenset({"metronome-transport"})
    )

    async def start(self, spec: EngineSpec) -> Mapping[str, Any]:
        self._name, self._version = spec.name, spec.version
        return {"fingerprint": "one", "max_context": spec.max_context}

    async def generate(self, requests: Sequence[GenerateRequest]) -> AsyncIterator[list[Delta]]:
        await asyncio.sleep(self.options.generate_s)
        step, last = self._version.step, self.options.parts - 1
        for part in range(self.options.parts):
            yield [self._answer(request, step, part == last) for request in requests]

    def _answer(self, request: GenerateRequest, step: int, last: bool) -> Delta:
        size = min(self.options.tokens, request.max_new_tokens) // self.options.parts
        tokens = (request.seed % 7 + 1,) * size
        return Delta(request.id, tokens, (-0.5,) * len(tokens), step, step, "length" if last else "")

    async def update_weights(self, manifest: Manifest, transport: Chosen) -> Receipt:
        self._version = manifest.version
        return Receipt(self._name, manifest.version, "wire", manifest.wire_fingerprint)

    async def offload(self, parts: Sequence[str]) -> int:
        return 1

    async def onload(self, parts: Sequence[str]) -> None:
        """Do nothing: no part is offloaded."""

    async def abort(self, ids: Sequence[str]) -> None:
        """They end by themselves."""

    async def health(self) -> Health:
        return Health(True, self._version)

    async def stop(self) -> None:
        """Nothing to end."""


class TrainerOptions(Options):
    train_s: float = 1.0
    """Of a step, in all."""


class MetronomeTrainer(Trainer[TrainerOptions]):
    """Trains by waiting, at the end of an update."""

    def plan(self, lengths: Sequence[int], world_size: int, tokens_per_micro_batch: int = 0) -> ChunkPlan:
        return ChunkPlan(tuple((tuple(range(rank, len(lengths), world_size)),) for rank in range(world_size)))

    def start(self, spec: TrainerSpec) -> Mapping[str, Any]:
        self._lr, self._step = spec.optimizer.lr, 0
        return {}

    def begin_step(self, version: Version) -> None:
        """Nothing to reset."""

    def begin_update(self, denominators: Mapping[str, float]) -> None:
        """Nothing to divide."""

    def accumulate(self, chunk: Chunk, last: bool) -> None:
        """No row costs anything."""

    def finish_update(self, denominators: Mapping[str, float]) -> UpdateResult:
        time.sleep(self.options.train_s)
        return UpdateResult(UpdateOutcome.APPLIED, {"train/loss": (0.0, 1.0)}, 1.0, self._lr)

    def abort_update(self) -> None:
        """Nothing was accumulated."""

    def forward(self, chunk: Chunk, columns: Sequence[str]) -> RowBatch:
        tokens = chunk.rows.columns["tokens"]
        values = np.full(len(tokens.values), -0.5, np.float32)
        return chunk.rows.with_columns({name: Ragged(values, tokens.lengths) for name in columns})

    def publish(
        self, version: Version, transport: Chosen, location: str, payload: Payload = "full", base: str = ""
    ) -> Manifest:
        return _manifest(version)

    def load_published(self, manifest: Manifest, transport: Chosen) -> None:
        """All weights are one."""

    def save(self, directory: str) -> None:
        """Nothing to keep."""

    def load(self, directory: str) -> None:
        """Nothing was kept."""

    def export(self, directory: str) -> None:
        """Nothing to show."""


def _manifest(version: Version) -> Manifest:
    """One tensor whose bytes change with every step."""
    tensor = TensorInfo("weight", (1,), "F32", str(version.step), 4)
    return Manifest(version, "full", (tensor,), "", fingerprint=combined_fingerprint((tensor,)))
