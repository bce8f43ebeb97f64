# SPDX-License-Identifier: Apache-2.0
"""The fixture of engine tests: tiny real models, an engine on an event loop of its own, versions to publish.

It says nothing of what is right: `engine_truth` does.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from relax_core.api.component import Chosen
from relax_core.api.engine import Delta, Engine, EngineSpec, GenerateRequest
from relax_core.api.weights import Manifest, Receipt, Version
from relax_core.tensor_files import safetensors_file
from relax_core.tensor_files.transport import Disk

T = TypeVar("T")
Tensors = list[tuple[str, np.ndarray, str]]
VOCABULARY, CONTEXT = 64, 128
_DEADLINE_S = 120.0
_KNOWN_S = 30.0
LORA: Mapping[str, Any] = {"rank": 2, "alpha": 4.0, "targets": ("q_proj", "down_proj")}
"""`[model] lora`, for engines that take adapters."""
DISK = Chosen("weight-transport", "disk")


def tiny_qwen3(directory: str, seed: int) -> str:
    """A Qwen3 of 60 thousand parameters with peaked, varied distributions, saved as a Hugging Face folder."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=48, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        head_dim=32, intermediate_size=96, max_position_embeddings=CONTEXT, tie_word_embeddings=True,
        initializer_range=0.2, pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        Qwen3ForCausalLM(config).save_pretrained(directory)
    return directory


def tensors_of(directory: str) -> Tensors:
    """Return the tensors of a folder's single safetensors file."""
    tensors, dtypes, _ = safetensors_file.read(Path(directory) / "model.safetensors")
    return [(name, array, dtypes[name]) for name, array in tensors.items()]


class EngineFixture:
    """A started engine, two model folders of one architecture, and a place to publish from one to the other."""

    def __init__(self, engine: Engine, model: str, other: str, transport: Disk | None = None) -> None:
        self.engine, self.model, self.other = engine, model, other
        self.location = tempfile.mkdtemp(prefix="relax-lab-")
        self.runner = asyncio.Runner()
        self.facts: dict[str, Any] = {}
        self._transport = transport or Disk()
        self._step = 0
        self._requests = 0

    def start(self, dtype: str = "float32", **spec: Any) -> EngineFixture:
        lora = {"lora": LORA} if self.engine.capabilities.lora else {}
        chosen = EngineSpec({"path": self.model, "dtype": dtype, **lora}, CONTEXT, **spec)
        self.facts = dict(self.run(self.engine.start(chosen), 600.0))
        return self

    def stop(self) -> None:
        try:
            self.run(self.engine.stop())
        finally:
            self.runner.close()
            shutil.rmtree(self.location, ignore_errors=True)

    def run(self, coroutine: Coroutine[Any, Any, T], deadline_s: float = _DEADLINE_S) -> T:
        return self.runner.run(_within(coroutine, deadline_s))

    def request(self, tokens: Sequence[int], max_new_tokens: int, **fields: Any) -> GenerateRequest:
        self._requests += 1
        return GenerateRequest(f"request-{self._requests}", tuple(tokens), max_new_tokens, **fields)

    def generate(self, *requests: GenerateRequest) -> list[Delta]:
        """One joined delta a request, in their order."""
        return self.run(gather(self.engine, requests))

    def publish(self, tensors: Tensors | None = None, version: Version | None = None, source: str = "") -> Manifest:
        """A version of the other folder's weights, or of the tensors given."""
        self._step = max(self._step + 1, version.step if version else 0)
        chosen = version or Version("actor", self.version.incarnation, self._step)
        return self._transport.send(chosen, "full", "", tensors or tensors_of(source or self.other), self.location)

    def update(self, manifest: Manifest) -> Receipt:
        return self.run(self.engine.update_weights(manifest, DISK))

    @property
    def version(self) -> Version:
        return self.run(self.engine.health()).version


async def gather(engine: Engine, requests: Sequence[GenerateRequest]) -> list[Delta]:
    """Run requests to their end and join each one's deltas."""
    parts: dict[str, list[Delta]] = {request.id: [] for request in requests}
    async for deltas in engine.generate(requests):
        for delta in deltas:
            parts[delta.id].append(delta)
    return [joined(parts[request.id]) for request in requests]


def joined(parts: Sequence[Delta]) -> Delta:
    """Deltas of one request as one; checks that exactly the last one finishes."""
    assert parts, "the request ended without a delta"
    assert [bool(part.finish) for part in parts] == [False] * (len(parts) - 1) + [True]
    tokens = tuple(token for part in parts for token in part.tokens)
    log_probs = tuple(value for part in parts for value in part.log_probs)
    assert len(tokens) == len(log_probs)
    last = parts[-1]
    top = tuple(item for part in parts for item in part.top)
    oldest = min(part.oldest_cache for part in parts)
    return Delta(last.id, tokens, log_probs, last.version, oldest, last.finish, last.error, top=top)


def damaged(tensors: Tensors, fault: str) -> Tensors:
    """The same weights with one thing wrong."""
    (name, array, dtype), *rest = tensors
    wrong: dict[str, Tensors] = {
        "missing": [],
        "extra": [(name, array, dtype), ("surplus.weight", array, dtype)],
        "shape": [(name, array.T.copy(), dtype)],
        "dtype": [(name, array.astype(np.float16), "F16")],
        "renamed": [(f"{name}.bias", array, dtype)],
    }
    return [*wrong[fault], *rest]


async def until_known(engine: Engine, count: int, running: asyncio.Task[Any] | None = None) -> None:
    """Wait until the engine holds so many requests, or all of them have ended already."""
    async with asyncio.timeout(_KNOWN_S):
        while True:
            health = await engine.health()
            if health.running + health.waiting == count or (running is not None and running.done()):
                return
            await asyncio.sleep(0.001)


async def _within(coroutine: Coroutine[Any, Any, T], deadline_s: float) -> T:
    async with asyncio.timeout(deadline_s):
        return await coroutine
