# SPDX-License-Identifier: Apache-2.0
"""The fixture of engine tests: tiny real models, a started engine, and versions to publish to the engine.

The reference for the engine's results is a plain forward without cache, padding or batching. This module imports no
engine's code.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from relax_core.api.component import Chosen
from relax_core.api.engine import Delta, Engine, EngineSpec, GenerateRequest
from relax_core.api.weights import Manifest, Payload, Receipt, Version
from relax_core.tensor_files import safetensors_file
from relax_core.tensor_files.transport import Disk

T = TypeVar("T")
Tensors = list[tuple[str, np.ndarray, str]]
VOCABULARY, CONTEXT = 64, 4096
PROMPT = (5, 9, 33, 2, 17)
PROMPTS = (PROMPT, (7,), (60, 3), (5, 9, 33, 2, 18), tuple(range(2, 40)))
TOLERANCE = 1e-4
_DEADLINE_S = 120.0
_KNOWN_S = 30.0
LORA: Mapping[str, Any] = {"rank": 2, "alpha": 4.0, "targets": ("q_proj", "down_proj")}
"""The `[model] lora` table for engines with the capability `lora`."""
DISK = Chosen("weight-transport", "disk")
SAFETENSORS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


class EngineFixture:
    """An engine with an event loop, two model folders of one architecture, and a folder for published weights."""

    def __init__(self, engine: Engine, model: str, other: str, transport: Disk | None = None) -> None:
        self.engine, self.model, self.other = engine, model, other
        self._folder = tempfile.TemporaryDirectory(prefix="relax-lab-")  # deleted also without `stop`
        self.location = self._folder.name
        self.runner = asyncio.Runner()
        self.facts: dict[str, Any] = {}
        self.transport = transport or Disk()
        self._step = self._requests = 0

    def start(self, dtype: str = "float32", head_dtype: str = "", **spec: Any) -> EngineFixture:
        lora = {"lora": LORA} if self.engine.capabilities.lora else {}
        table = {"path": self.model, "dtype": dtype, "head_dtype": head_dtype, **lora}
        chosen = EngineSpec(table, CONTEXT, **spec)
        self.facts = dict(self.run(self.engine.start(chosen), 600.0))
        return self

    def stop(self) -> None:
        try:
            self.run(self.engine.stop())
        finally:
            self.runner.close()
            self._folder.cleanup()

    def run(self, coroutine: Coroutine[Any, Any, T], deadline_s: float = _DEADLINE_S) -> T:
        async def within() -> T:
            async with asyncio.timeout(deadline_s):
                return await coroutine

        return self.runner.run(within())

    def request(self, tokens: Sequence[int], max_new_tokens: int, **fields: Any) -> GenerateRequest:
        self._requests += 1
        return GenerateRequest(f"request-{self._requests}", tuple(tokens), max_new_tokens, **fields)

    def generate(self, *requests: GenerateRequest) -> list[Delta]:
        """Run requests to their end; return one joined delta per request, in their order."""
        return self.run(gather(self.engine, requests))

    def endless(self, tokens: Sequence[int], **fields: Any) -> GenerateRequest:
        """Return a request that fills the context, for tests that pause, update or abort while it is running."""
        return self.request(tokens, CONTEXT - len(tokens), **fields)

    def updated_amid(self, requests: Sequence[GenerateRequest], update: Callable[[], object]) -> list[Delta]:
        """Start endless requests, call `update` after their first tokens, and return all deltas in order.

        Engines may run the requests one after another. When each request that had tokens before the update also has tokens
        of the new version, all requests are aborted.
        """

        async def start() -> tuple[AsyncIterator[Sequence[Delta]], list[Delta]]:
            stream = self.engine.generate(requests)
            parts = list(await anext(stream))
            await self.engine.pause()
            health = await self.engine.health()
            assert health.running + health.waiting == len(requests), "endless requests have ended before the update"
            return stream, parts

        async def finish() -> None:
            await self.engine.resume()
            new = (await self.engine.health()).version.step
            waiting = {part.id for part in parts}
            async for deltas in stream:
                parts.extend(deltas)
                fresh = {delta.id for delta in deltas if delta.version == new and delta.tokens}
                if waiting and not (waiting := waiting - fresh):
                    await self.engine.abort([request.id for request in requests])

        stream, parts = self.run(start())
        update()
        self.run(finish())
        return parts

    def publish(self, tensors: Tensors | None = None, version: Version | None = None, source: str = "") -> Manifest:
        """Publish a version: the given tensors, or the weights of the folder `source` (default: `self.other`)."""
        return self._send(version, "full", "", tensors or tensors_of(source or self.other))

    def publish_delta(self, tensors: Tensors) -> Manifest:
        """Publish a delta relative to the version that was sent last."""
        return self._send(None, "delta", str(Version("actor", self.version.incarnation, self._step)), tensors)

    def publish_adapter(self, tensors: Tensors, base: str = "") -> Manifest:
        """Publish an adapter for the weights with fingerprint `base` (default: the engine's starting weights)."""
        return self._send(None, "lora", base or str(self.facts["fingerprint"]), tensors)

    def _send(self, version: Version | None, payload: Payload, base: str, tensors: Tensors) -> Manifest:
        self._step = max(self._step + 1, version.step if version else 0)
        chosen = version or Version("actor", self.version.incarnation, self._step)
        return self.transport.send(chosen, payload, base, tensors, self.location)

    def update(self, manifest: Manifest) -> Receipt:
        return self.run(self.engine.update_weights(manifest, DISK))

    @property
    def version(self) -> Version:
        return self.run(self.engine.health()).version


async def gather(engine: Engine, requests: Sequence[GenerateRequest]) -> list[Delta]:
    """Run requests to their end; return one joined delta per request, in their order."""
    parts: dict[str, list[Delta]] = {request.id: [] for request in requests}
    async for deltas in engine.generate(requests):
        for delta in deltas:
            parts[delta.id].append(delta)
    return [joined(parts[request.id]) for request in requests]


def joined(parts: Sequence[Delta]) -> Delta:
    """Join the deltas of one request; assert that only the last one has a `finish`."""
    assert parts, "generate() ended a request without a delta"
    assert [bool(part.finish) for part in parts] == [False] * (len(parts) - 1) + [True]
    tokens = tuple(token for part in parts for token in part.tokens)
    log_probs = tuple(value for part in parts for value in part.log_probs)
    assert len(tokens) == len(log_probs)
    last = parts[-1]
    top = tuple(item for part in parts for item in part.top)
    oldest = min(part.oldest_cache for part in parts)
    return Delta(
        last.id,
        tokens,
        log_probs,
        last.version,
        oldest,
        last.finish,
        last.error,
        top=top,
        cached=last.cached,
        drafts=last.drafts,
    )


async def until_known(engine: Engine, count: int, running: asyncio.Task[Any] | None = None) -> None:
    """Wait until `health` counts this number of running and waiting requests, or `running` is done."""
    async with asyncio.timeout(_KNOWN_S):
        while True:
            health = await engine.health()
            if health.running + health.waiting == count or (running is not None and running.done()):
                return
            await asyncio.sleep(0.001)


# -- the reference -----------------------------------------------------------------------------------------------------


def plain_log_probs(directory: str, tokens: Sequence[int]) -> np.ndarray:
    """Compute the log-probs [tokens, vocabulary] after each token of one sequence in float32."""
    import torch

    files = tuple((str(path), path.stat().st_mtime_ns) for path in sorted(Path(directory).iterdir()))
    model = _plain_model(directory, files)
    with torch.no_grad():
        logits: np.ndarray = model(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0].numpy()
    return log_softmax(logits)


@lru_cache(maxsize=4)
def _plain_model(directory: str, files: tuple[tuple[str, int], ...]) -> Any:
    """Load a folder's model; cached by its files, because loading takes longer than the forward pass."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, local_files_only=True).eval()


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))


def agrees(
    model: str, prompt: tuple[int, ...], got: Delta, how: Callable[[np.ndarray], np.ndarray] | None = None
) -> np.ndarray:
    """Assert that the log-probs of `got` equal plain ones converted by `how`; return the plain log-probs."""
    plain = plain_log_probs(model, (*prompt, *got.tokens))
    rows = plain[len(prompt) - 1 : -1]
    rows = rows if how is None else how(rows)
    want = rows[np.arange(len(got.tokens)), list(got.tokens)]
    np.testing.assert_allclose(got.log_probs, want, atol=TOLERANCE, rtol=0)
    return plain


def truncated(plain: np.ndarray, top_k: int, top_p: float) -> np.ndarray:
    """Compute the log-probs after top_k, then top_p truncation, row by row."""
    out = np.full_like(plain, -np.inf)
    for row, log_probs in enumerate(plain):
        kept = (-log_probs).argsort(kind="stable")[:top_k]
        probs = np.exp(log_probs[kept]) / np.exp(log_probs[kept]).sum()
        count = int(np.searchsorted(probs.cumsum(), top_p)) + 1
        out[row, kept[:count]] = np.log(probs[:count] / probs[:count].sum())
    return out


# -- models and weights ------------------------------------------------------------------------------------------------


def tiny_qwen3(directory: str, seed: int) -> str:
    """Save a random Qwen3 of 60 thousand parameters with peaked distributions as a Hugging Face folder."""
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


def folder_with(model: str, arrays: Mapping[str, Any], folder: Path) -> str:
    """Copy a model folder with these weights, in float32; return the copy's path."""
    import torch
    from safetensors.torch import save_file

    shutil.copytree(model, folder)
    whole = {name: torch.as_tensor(np.array(array, np.float32)) for name, array in arrays.items()}
    save_file(whole, folder / "model.safetensors", {"format": "pt"})
    return str(folder)


def rounded(tensors: Tensors, dtype: str) -> Tensors:
    """Round float32 tensors to the format `dtype`, half to even."""
    import torch

    kind = getattr(torch, dtype)
    made: Tensors = []
    for name, array, _ in tensors:
        value = torch.from_numpy(np.array(array)).to(kind)
        bits = value.view(torch.uint16) if dtype == "bfloat16" else value
        made.append((name, bits.numpy(), SAFETENSORS[dtype]))
    return made


def damaged(tensors: Tensors, fault: str) -> Tensors:
    """Return the tensors with one fault."""
    (name, array, dtype), *rest = tensors
    wrong: dict[str, Tensors] = {
        "missing": [],
        "extra": [(name, array, dtype), ("surplus.weight", array, dtype)],
        "shape": [(name, array.T.copy(), dtype)],
        "dtype": [(name, array.astype(np.float16), "F16")],
        "renamed": [(f"{name}.bias", array, dtype)],
    }
    return [*wrong[fault], *rest]


def moved(tensors: Tensors, seed: int) -> Tensors:
    """Return the tensors with a tenth of the elements changed in every third tensor."""
    random = np.random.default_rng(seed)
    changed = [np.array(array) for _, array, _ in tensors]
    for array in changed[::3]:
        array[random.random(array.shape) < 0.1] *= np.float32(1.1)
    return [(name, array, dtype) for (name, _, dtype), array in zip(tensors, changed, strict=True)]


def adapter(model: str, seed: int) -> Tensors:
    """Make random adapter tensors for all modules that `LORA` targets."""
    random, rank = np.random.default_rng(seed), LORA["rank"]
    pairs: Tensors = []
    for name, array, _ in tensors_of(model):
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in LORA["targets"]:
            rows, columns = array.shape
            for side, shape in (("A", (rank, columns)), ("B", (rows, rank))):
                low = random.normal(0, 0.3, shape).astype(np.float32)
                pairs.append((f"base_model.model.{module}.lora_{side}.weight", low, "F32"))
    return pairs


def merged(model: str, pairs: Tensors, folder: Path) -> str:
    """Merge an adapter into a model in float64, and save it as a folder."""
    parts = {name.removeprefix("base_model.model."): array.astype(np.float64) for name, array, _ in pairs}
    whole: dict[str, np.ndarray] = {}
    for name, array, _ in tensors_of(model):
        module = name.removesuffix(".weight")
        whole[name] = array.astype(np.float64)
        if f"{module}.lora_A.weight" in parts:
            low = parts[f"{module}.lora_B.weight"] @ parts[f"{module}.lora_A.weight"]
            whole[name] = whole[name] + LORA["alpha"] / LORA["rank"] * low
    return folder_with(model, whole, folder)
