# SPDX-License-Identifier: Apache-2.0
"""A pool over the real engine: weights land and engines die in mid-generation, and every token is what its version says."""

import asyncio
import os
import signal
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path

import pytest
from relax_plugin_transformers.engine import TransformersEngine

from relax_core.api.component import Chosen
from relax_core.api.engine import Capabilities, Delta, EngineSpec
from relax_core.api.role import SystemClock, WorkerSpec
from relax_core.api.weights import Manifest, Receipt, Version
from relax_core.engines.pool import EnginePool
from relax_core.engines.requests import PendingRequest
from relax_core.engines.slot import EngineSlot
from relax_core.runners.local.workers import LocalWorkers
from relax_core.tensor_files.transport import Disk
from relax_core.testing.engine_fixture import CONTEXT, DISK, PROMPTS, agrees, tensors_of, tiny_qwen3

pytestmark = pytest.mark.one_process("engines")  # whose fork server loads torch once
ENGINE = Chosen("engine", "transformers", {"deltas_every": 2, "device": "cpu"})
MORE = 20
"""Number of tokens of each request after the disturbance; without a disturbance, requests would fill the context."""


class _Watch:
    """Ends one request `more` tokens after a disturbance."""

    def __init__(self, begun: asyncio.Event, disturbed: asyncio.Event, more: int) -> None:
        self._begun, self._disturbed, self._more, self._until = begun, disturbed, more, CONTEXT

    def enough(self, tokens: Sequence[int]) -> bool:
        self._begun.set()
        if self._disturbed.is_set():
            self._until = min(self._until, len(tokens) + self._more)
        return len(tokens) >= self._until


class Stage:
    """A pool with one engine, and two models that take turns as its weights: step s is of folder s % 2."""

    def __init__(self, folder: Path, can: Capabilities) -> None:
        self.folders = [tiny_qwen3(str(folder / str(seed)), seed) for seed in (1, 2)]
        self.location, self.step = str(folder / "weights"), 0
        self.workers = LocalWorkers()
        spec = EngineSpec({"path": self.folders[0], "dtype": "float32"}, CONTEXT)
        worker = WorkerSpec("engine-0", ENGINE, preload=TransformersEngine.preload)
        slot = EngineSlot("engine-0", ENGINE, spec, worker, self.workers, can)
        self.pool = EnginePool([slot], SystemClock(), self, self._tell)

    async def update(self, slot: EngineSlot, manifest: Manifest, transport: Chosen) -> Receipt:
        """The pool's feed: what it was told of, believed."""
        receipt = await slot.update(manifest, transport)
        slot.state.loaded = manifest.version
        return receipt

    async def forget(self, slot: EngineSlot) -> None:
        """Nobody remembers."""

    async def _tell(self, what: str, detail: str, seconds: float) -> None:
        """Nobody listens."""

    async def publish(self) -> None:
        self.step += 1
        manifest: Manifest = Disk().send(
            Version("actor", 0, self.step), "full", "", tensors_of(self.folders[self.step % 2]), self.location
        )
        await self.pool.supervisor.update(manifest, DISK)

    async def kill(self) -> None:
        os.kill(self.pool.facts()["engine-0"]["pid"], signal.SIGKILL)

    async def sample(self, disturb: Callable[[], object], more: int = MORE) -> list[PendingRequest]:
        """Sample completions of all prompts, and disturb when the first tokens have come; each has `more` after that."""
        begun, disturbed = asyncio.Event(), asyncio.Event()
        requests = [
            PendingRequest(prompt, CONTEXT - len(prompt), seed=seed, watch=_Watch(begun, disturbed, more).enough)
            for seed, prompt in enumerate(PROMPTS)
        ]
        asked = asyncio.ensure_future(self.pool.generate(requests))
        await begun.wait()
        await disturb()  # type: ignore[misc]
        disturbed.set()
        await asked
        return requests

    def holds(self, prompt: tuple[int, ...], got: PendingRequest) -> None:
        """Each run of tokens of one version is what a plain forward of that version gives."""
        assert len(got.tokens) == len(got.log_probs) == len(got.versions)
        tokens = zip(got.versions, got.tokens, got.log_probs, strict=True)
        for version, run in groupby(tokens, key=lambda token: token[0]):
            _, ids, log_probs = zip(*run, strict=True)
            agrees(self.folders[version % 2], prompt, Delta("", ids, log_probs, version, version))
            prompt += ids


@pytest.mark.parametrize("can", [Capabilities(in_flight_updates=True), Capabilities()], ids=["in-flight", "let-go"])
async def test_a_publish_in_mid_generation_changes_the_tokens_after_it_and_no_other(
    tmp_path: Path, can: Capabilities
) -> None:
    stage = Stage(tmp_path, can)
    await stage.pool.start()
    try:
        completions = await stage.sample(stage.publish)
        for prompt, got in zip(PROMPTS, completions, strict=True):
            stage.holds(prompt, got)
        assert any(len(set(got.versions)) > 1 for got in completions)
    finally:
        await stage.pool.close()
        await stage.workers.close()


async def test_a_new_engine_continues_the_samples_of_a_killed_engine(tmp_path: Path) -> None:
    stage = Stage(tmp_path, Capabilities(in_flight_updates=True))
    await stage.pool.start()
    try:
        cut = await stage.sample(stage.kill)
        longest = max(len(got.tokens) for got in cut)
        for prompt, got, whole in zip(PROMPTS, cut, await stage.sample(lambda: asyncio.sleep(0), longest), strict=True):
            stage.holds(prompt, got)
            assert got.tokens == whole.tokens[: len(got.tokens)], "same seed, same tokens, wherever it was cut"
    finally:
        await stage.pool.close()
        await stage.workers.close()
