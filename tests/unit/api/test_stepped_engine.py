# SPDX-License-Identifier: Apache-2.0
"""The engine around a library that takes steps, with a library that counts: token n is followed by n + 1."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relax_core.api import ConfigError, Delta, EngineSpec, GenerateRequest, InfrastructureError, Version
from relax_core.api.component import Chosen
from relax_core.api.engine import Capabilities
from relax_core.api.options import Options
from relax_core.engine_kit.stepped_engine import StepOutput, SteppedEngine, Stepper
from relax_core.tensor_files.transport import Disk

VOCABULARY, CONTEXT = 1000, 100
DISK = Chosen("weight-transport", "disk")
REFUSED = 13
"""A token that the counter takes no requests with."""


class Counter:
    """Gives one token a step to each of its requests."""

    vocab_size, max_context, dtype, model_type = VOCABULARY, CONTEXT, "float32", "counter"
    kv_tokens = 77

    def __init__(self) -> None:
        self.requests: dict[str, tuple[GenerateRequest, list[int]]] = {}
        self.scored: dict[str, tuple[int, ...]] = {}
        self.begun_ones: set[str] = set()
        self.forgotten: list[bool] = []
        self.laid: list[frozenset[str]] = []
        self.broken = self.stopped = False

    def add(self, request: GenerateRequest) -> None:
        if REFUSED in request.tokens:
            raise ValueError(f"{REFUSED} is not for counting")
        self.requests[request.id] = (request, [])

    def add_score(self, name: str, tokens: tuple[int, ...], temperature: float) -> None:
        self.scored[name] = tokens

    def abort(self, names: Sequence[str]) -> None:
        for name in names:
            self.requests.pop(name, None)

    def step(self) -> Mapping[str, StepOutput]:
        if self.broken:
            raise RuntimeError("it broke")
        news = {name: StepOutput((), (), "length", scores=(-1.0,) * (len(t) - 1)) for name, t in self.scored.items()}
        self.scored.clear()
        for name, (request, so_far) in list(self.requests.items()):
            so_far.append(request.tokens[-1] + len(so_far) + 1)
            self.begun_ones.add(name)
            done = len(so_far) == request.max_new_tokens
            news[name] = StepOutput(
                (so_far[-1],), (-0.5,), "length" if done else "", top=(((so_far[-1], -0.5), (0, -1.0)),)
            )
            if request.routed_experts and done:
                news[name].routed_experts = bytes([9]) * len(so_far)
            if done:
                del self.requests[name]
        return news

    def started(self) -> Iterable[str]:
        return self.begun_ones

    def routed_experts(self, name: str) -> bytes:
        return bytes(len(self.requests[name][1]))

    def load(self, arrays: Iterable[tuple[str, np.ndarray, str]]) -> None:
        self.weights = {name: array.copy() for name, array, _ in arrays}

    def checksums(self) -> Mapping[str, str]:
        return {name: str(array.sum()) for name, array in self.weights.items()}

    def forget_caches(self, running: bool) -> None:
        self.forgotten.append(running)

    def offload(self, parts: frozenset[str]) -> int:
        self.laid.append(parts)
        return 7

    def onload(self, parts: frozenset[str]) -> None:
        self.laid.append(parts)

    def stop(self) -> None:
        self.stopped = True


class CountingEngine(SteppedEngine[Options]):
    capabilities = Capabilities(
        routed_experts=True, score=True, offloads=frozenset({"weights", "kv"}), transports=frozenset({"disk"})
    )

    def prepare(self) -> Mapping[str, Any]:
        return {"device": "abacus"}

    def make(self, spec: EngineSpec) -> Stepper:
        self.counter = Counter()
        return self.counter


def published(folder: Path, step: int, values: Sequence[float] = (1.0, 2.0)) -> Any:
    return Disk().send(Version("actor", 0, step), "full", "", [("a", np.array(values, np.float32), "F32")], str(folder))


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[CountingEngine]:
    async for made in started(tmp_path):
        yield made


def model_folder(tmp_path: Path) -> str:
    folder = tmp_path / "model"
    folder.mkdir()
    shutil.copy(published(tmp_path, 0).location, folder / "model.safetensors")
    return str(folder)


async def started(tmp_path: Path, **fields: Any) -> AsyncIterator[CountingEngine]:
    made = CountingEngine(Options())
    made.build = lambda chosen: Disk()
    facts = await made.start(EngineSpec({"path": model_folder(tmp_path)}, CONTEXT, **fields))
    assert (facts["vocab_size"], facts["parameters"], facts["device"]) == (VOCABULARY, 2, "abacus")
    assert facts["kv_tokens"] == 77
    yield made
    await made.stop()
    assert made.counter.stopped


async def gathered(engine: CountingEngine, *requests: GenerateRequest) -> dict[str, list[Delta]]:
    found: dict[str, list[Delta]] = {request.id: [] for request in requests}
    async for deltas in engine.generate(requests):
        for delta in deltas:
            found[delta.id].append(delta)
    return found


async def until_running(engine: CountingEngine, count: int) -> None:
    async with asyncio.timeout(120):
        while (await engine.health()).running < count:
            await asyncio.sleep(0)


def tokens(deltas: Sequence[Delta]) -> list[int]:
    return [token for delta in deltas for token in delta.tokens]


async def test_requests_run_side_by_side_to_their_ends(engine: CountingEngine) -> None:
    found = await gathered(engine, GenerateRequest("a", (1,), 3), GenerateRequest("b", (50, 60), 9, num_top=1))
    assert (tokens(found["a"]), tokens(found["b"])) == ([2, 3, 4], list(range(61, 70)))
    assert [delta.finish for delta in found["a"]][-1] == "length"
    assert {delta.top for delta in found["a"]} == {()}
    assert all(len(pairs) == 1 for delta in found["b"] for pairs in delta.top)


async def test_tokens_that_are_sent_together_are_one_delta(engine: CountingEngine) -> None:
    deltas = (await gathered(engine, GenerateRequest("a", (1,), 9, num_top=1)))["a"]
    assert [len(delta.tokens) for delta in deltas] == [4, 4, 1]
    assert [delta.log_probs for delta in deltas] == [(-0.5,) * 4, (-0.5,) * 4, (-0.5,)]
    assert [len(delta.top) for delta in deltas] == [4, 4, 1]


async def test_a_call_that_the_library_refuses_leaves_nothing_behind(engine: CountingEngine) -> None:
    with pytest.raises(ValueError, match="not for counting"):
        await gathered(engine, GenerateRequest("a", (1,), 3), GenerateRequest("b", (REFUSED,), 3))
    assert not engine.counter.requests
    assert (await engine.health()).running == 0
    assert tokens((await gathered(engine, GenerateRequest("a", (1,), 2)))["a"]) == [2, 3]


async def test_an_id_that_runs_cannot_come_again(engine: CountingEngine) -> None:
    await engine.pause()
    first = asyncio.create_task(gathered(engine, GenerateRequest("a", (1,), 3)))
    await until_running(engine, 1)
    with pytest.raises(ValueError, match="already running"):
        await gathered(engine, GenerateRequest("a", (5,), 3))
    await engine.resume()
    assert tokens((await first)["a"]) == [2, 3, 4]


async def test_scores_come_while_requests_are_paused(engine: CountingEngine) -> None:
    await engine.pause()
    assert await engine.score([(1, 2, 3), (4,), ()]) == [[0.0, -1.0, -1.0], [0.0], []]


async def test_an_update_drops_all_caches_and_proves_the_weights_in_memory(
    engine: CountingEngine, tmp_path: Path
) -> None:
    manifest = published(tmp_path, 1, (3.0, 4.0))
    receipt = await engine.update_weights(manifest, DISK)
    assert receipt.fingerprint == manifest.fingerprint
    assert receipt.resident
    assert engine.counter.forgotten == [True]
    (delta, *_) = (await gathered(engine, GenerateRequest("a", (1,), 1)))["a"]
    assert (delta.version, delta.oldest_cache) == (1, 1)


async def test_kept_caches_are_as_old_as_what_was_computed_first(tmp_path: Path) -> None:
    async for engine in started(tmp_path, kv_across_versions=True):
        await engine.pause()
        calls = [GenerateRequest(name, (1,), 2) for name in ("began", "waits")]
        running = asyncio.create_task(gathered(engine, *calls))
        await until_running(engine, 2)
        engine.counter.begun_ones = {"began"}  # its prompt is half computed, no token is sampled
        await engine.update_weights(published(tmp_path, 4), DISK)
        assert engine.counter.forgotten == [False]
        await engine.resume()
        found = await running
        assert {delta.version for deltas in found.values() for delta in deltas} == {4}
        assert {delta.oldest_cache for delta in found["began"]} == {0}
        assert {delta.oldest_cache for delta in found["waits"]} == {4}


async def test_experts_are_reported_before_the_weights_change_and_at_every_end(
    engine: CountingEngine, tmp_path: Path
) -> None:
    await engine.pause()
    calls = [GenerateRequest(name, (1,), 3, routed_experts=True) for name in ("ends", "aborted")]
    running = asyncio.create_task(gathered(engine, *calls))
    await until_running(engine, 2)
    engine.counter.step()
    await engine.update_weights(published(tmp_path, 4), DISK)
    await engine.abort(["aborted"])
    await engine.resume()
    found = {name: [(d.version, d.routed_experts) for d in deltas] for name, deltas in (await running).items()}
    assert found["aborted"] == [(0, bytes(1)), (4, bytes(1))]
    assert found["ends"][0] == (0, bytes(1)) and found["ends"][-1] == (4, bytes([9]) * 3)


async def test_weights_that_load_by_half_end_the_engine(engine: CountingEngine, tmp_path: Path) -> None:
    def half(arrays: Iterable[Any]) -> None:
        next(iter(arrays))
        raise RuntimeError("the rest is lost")

    engine.counter.load = half  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="the rest is lost"):
        await engine.update_weights(published(tmp_path, 1), DISK)
    with pytest.raises(InfrastructureError, match="the rest is lost"):
        await gathered(engine, GenerateRequest("a", (1,), 1))
    assert not (await engine.health()).ok


async def test_a_broken_library_fails_all_open_requests(engine: CountingEngine) -> None:
    engine.counter.broken = True
    with pytest.raises(InfrastructureError, match="it broke"):
        await gathered(engine, GenerateRequest("a", (1,), 3))
    with pytest.raises(InfrastructureError, match="it broke"):
        await engine.score([(1, 2)])


async def test_parts_lie_down_once_and_wake(engine: CountingEngine) -> None:
    assert [await engine.offload(parts) for parts in (["kv"], ["kv"], ["kv", "weights"])] == [7, 0, 7]
    with pytest.raises(ValueError, match="offloaded"):
        await engine.score([(1, 2)])
    await engine.onload(["weights", "kv"])
    kv, weights = frozenset({"kv"}), frozenset({"weights"})
    assert engine.counter.laid == [kv, weights, kv | weights]
    assert tokens((await gathered(engine, GenerateRequest("a", (1,), 1)))["a"]) == [2]


async def test_a_folder_without_weights_is_refused_before_the_library_is_made(tmp_path: Path) -> None:
    engine = CountingEngine(Options())
    with pytest.raises(ConfigError, match="model.path"):
        await engine.start(EngineSpec({"path": str(tmp_path)}, CONTEXT))
    assert not hasattr(engine, "counter")


class Keeping(Options):
    keep_weights: bool = False


class KeepingEngine(SteppedEngine[Keeping]):
    """One that puts deltas on a copy, where its option says so."""

    capabilities = Capabilities(delta=True, transports=frozenset({"disk"}))
    switches = {"delta": "keep_weights"}
    prepare, make = CountingEngine.prepare, CountingEngine.make  # type: ignore[assignment]


async def keeping(tmp_path: Path, keep: bool) -> KeepingEngine:
    made = KeepingEngine(Keeping(keep_weights=keep))
    made.build = lambda chosen: Disk()
    await made.start(EngineSpec({"path": model_folder(tmp_path)}, CONTEXT))
    return made


def chain(folder: Path, *values: Mapping[str, Sequence[float]]) -> list[Any]:
    """A full version of step 0, and deltas."""
    disk, manifests = Disk(), list[Any]()
    for step, held in enumerate(values):
        tensors = [(name, np.array(array, np.float32), "F32") for name, array in held.items()]
        base = str(Version("actor", 0, step - 1)) if step else ""
        manifests.append(
            disk.send(Version("actor", 0, step), "delta" if step else "full", base, tensors, str(folder / "sent"))
        )
    return manifests


async def test_deltas_lie_on_the_folder_and_the_library_is_given_whole_versions(tmp_path: Path) -> None:
    engine = await keeping(tmp_path, keep=True)
    _, first, second = chain(tmp_path, {"a": (1.0, 2.0)}, {"a": (1.0, 5.0)}, {"a": (1.0, 5.0)})
    for manifest in (first, second):
        receipt = await engine.update_weights(manifest, DISK)
        assert receipt.fingerprint == manifest.wire_fingerprint
        assert engine.counter.weights["a"].tolist() == [1.0, 5.0]  # type: ignore[attr-defined]
    await engine.stop()


async def test_an_engine_that_keeps_nothing_says_how_it_would_take_deltas(tmp_path: Path) -> None:
    engine = await keeping(tmp_path, keep=False)
    _, delta = chain(tmp_path, {"a": (1.0, 2.0)}, {"a": (1.0, 5.0)})
    with pytest.raises(ValueError, match="engine.keep_weights = true"):
        await engine.update_weights(delta, DISK)
    assert (await engine.health()).version.step == 0
    await engine.stop()


async def test_a_delta_that_breaks_off_while_it_is_loaded_ends_the_engine(tmp_path: Path) -> None:
    engine = await keeping(tmp_path, keep=True)
    _, delta = chain(tmp_path, {"a": (1.0, 2.0)}, {"a": (1.0, 5.0)})
    engine.counter.load = lambda arrays: next(iter(arrays)) and 1 / 0  # type: ignore[attr-defined]
    with pytest.raises(ZeroDivisionError):
        await engine.update_weights(delta, DISK)
    assert not (await engine.health()).ok
    await engine.stop()
