# SPDX-License-Identifier: Apache-2.0
"""Versions that are not whole models: deltas on what the engine has, adapters on its base; scores for a canary."""

import asyncio
import os
import sys
from asyncio.subprocess import PIPE
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from relax_plugin_transformers.engine import TransformersEngine

from relax_core.api import Chosen, SystemClock, WorkerSpec
from relax_core.api.engine import EngineSpec
from relax_core.api.errors import InfrastructureError
from relax_core.api.weights import PLAIN, Canary, Manifest, Payload, Version
from relax_core.engines.slot import EngineSlot
from relax_core.engines.supervisor import WeightUpdater
from relax_core.runners.local.workers import LocalWorkers
from relax_core.tensor_files.transport import Disk
from relax_core.testing.engine_fixture import (
    CONTEXT,
    PROMPT,
    EngineFixture,
    Tensors,
    log_softmax,
    plain_log_probs,
    tensors_of,
    tiny_qwen3,
)
from relax_core.weights.registry import WeightRegistry

RANK, ALPHA = 2, 8.0
MODULES = ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj")
DISK = Chosen("weight-transport", "disk")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    first, second = (tiny_qwen3(str(tmp_path_factory.mktemp("model")), seed) for seed in (1, 2))
    return first, second


@pytest.fixture
def lab(folders: tuple[str, str]) -> Iterator[EngineFixture]:
    engine = TransformersEngine()
    engine.build = lambda chosen: Disk()
    lab = EngineFixture(engine, *folders)
    model = {"path": folders[0], "dtype": "float32", "lora": {"rank": RANK, "alpha": ALPHA, "targets": ()}}
    lab.facts = dict(lab.run(engine.start(EngineSpec(model, CONTEXT, version=at(0))), 600.0))
    yield lab
    lab.stop()


def at(step: int) -> Version:
    return Version("actor", 0, step)


def send(lab: EngineFixture, step: int, tensors: Tensors, payload: Payload = "full", base: str = "") -> Manifest:
    return lab.transport.send(at(step), payload, base, tensors, lab.location)


def moved(tensors: Tensors, seed: int) -> Tensors:
    """Some elements of some tensors."""
    random = np.random.default_rng(seed)
    changed = [np.array(array) for _, array, _ in tensors]
    for array in changed[::3]:
        array[random.random(array.shape) < 0.1] *= np.float32(1.01)
    return [(name, array, dtype) for (name, _, dtype), array in zip(tensors, changed, strict=True)]


def weights(lab: EngineFixture) -> dict[str, np.ndarray]:
    held = lab.engine._weights  # type: ignore[attr-defined]
    return {name: np.array(held.value(name)) for name in held.tensors}


def test_a_delta_gives_what_the_whole_version_would(lab: EngineFixture) -> None:
    first = list(tensors_of(lab.other))
    lab.update(send(lab, 1, first))
    second = moved(first, 1)
    manifest = send(lab, 2, second, "delta", str(at(1)))
    receipt = lab.update(manifest)
    assert (receipt.fingerprint, receipt.resident) == (manifest.wire_fingerprint, manifest.fingerprint)
    assert (receipt.level, receipt.layout) == ("resident", PLAIN)
    assert {"wire", "load", "proof"} == set(receipt.times)
    for name, array, _ in second:
        np.testing.assert_array_equal(weights(lab)[name], array)


@pytest.mark.parametrize("fault", ["base", "damaged", "other model"])
def test_a_wrong_delta_leaves_the_engine_as_it_was(lab: EngineFixture, fault: str) -> None:
    first = list(tensors_of(lab.other))
    lab.update(send(lab, 1, first))
    send(lab, 2, moved(first, 1), "delta", str(at(1)))
    manifest = send(lab, 3, moved(first, 2), "delta", str(at(2)))
    if fault == "damaged":
        manifest = replace(manifest, base=str(at(1)))
    if fault == "other model":
        manifest = replace(manifest, tensors=manifest.tensors[1:])
    before = weights(lab)
    with pytest.raises(ValueError):
        lab.update(manifest)
    assert lab.version == at(1) and lab.run(lab.engine.health()).ok
    assert all(np.array_equal(before[name], array) for name, array in weights(lab).items())


# -- adapters ---------------------------------------------------------------------------------------------------


def adapter(seed: int, modules: tuple[str, ...] = MODULES, lab: EngineFixture | None = None) -> Tensors:
    random = np.random.default_rng(seed)
    shapes = {name.removesuffix(".weight"): array.shape for name, array, _ in tensors_of(lab.model)} if lab else {}
    out: Tensors = []
    for module in modules:
        rows, columns = shapes.get(module, (4, 4))
        for side, shape in (("A", (RANK, columns)), ("B", (rows, RANK))):
            array = random.normal(0, 0.1, shape).astype(np.float32)
            out.append((f"base_model.model.{module}.lora_{side}.weight", array, "F32"))
    return out


def merged(lab: EngineFixture, tensors: Tensors) -> dict[str, np.ndarray]:
    """In float64."""
    base = {name: np.array(array) for name, array, _ in tensors_of(lab.model)}
    parts = {name.removeprefix("base_model.model."): array.astype(np.float64) for name, array, _ in tensors}
    for module in {name.rpartition(".lora_")[0] for name in parts}:
        low_rank = parts[f"{module}.lora_B.weight"] @ parts[f"{module}.lora_A.weight"]
        base[f"{module}.weight"] = base[f"{module}.weight"] + ALPHA / RANK * low_rank
    return base


def test_each_adapter_lies_over_the_base_and_not_over_the_one_before(lab: EngineFixture) -> None:
    base = lab.facts["fingerprint"]
    for step in (1, 2, 3):
        tensors = adapter(step, lab=lab)
        manifest = send(lab, step, tensors, "lora", base)
        receipt = lab.update(manifest)
        assert (receipt.fingerprint, receipt.level) == (manifest.wire_fingerprint, "resident")
        assert receipt.resident not in ("", base) and receipt.layout != PLAIN
        for name, want in merged(lab, tensors).items():
            np.testing.assert_allclose(weights(lab)[name], want, atol=1e-6)
    (got,) = lab.generate(lab.request(PROMPT, 5, seed=1))
    assert got.version == 3


@pytest.mark.parametrize(
    ("fault", "message"),
    [("base", "on top of"), ("unknown", "no such module"), ("half", "lora_A or lora_B"), ("module", "missing"),
     ("rank", "shapes"), ("other", "no such module")],
)  # fmt: skip
def test_a_wrong_adapter_is_refused_and_changes_nothing(lab: EngineFixture, fault: str, message: str) -> None:
    base = lab.facts["fingerprint"]
    good = adapter(1, lab=lab)
    lab.update(send(lab, 1, good, "lora", base))
    wrong: dict[str, Tensors] = {
        "base": good,
        "unknown": [*good, *adapter(2, ("model.layers.9.self_attn.q_proj",))],
        "half": good[1:],
        "module": good[2:],
        "rank": [(name, array[:1] if "lora_A" in name else array[:, :1], dtype) for name, array, dtype in good],
        "other": [*good, ("model.norm.weight", good[0][1], "F32")],
    }
    before = weights(lab)
    with pytest.raises(ValueError, match=message):
        lab.update(send(lab, 2, wrong[fault], "lora", "elsewhere" if fault == "base" else base))
    assert lab.version == at(1)
    assert all(np.array_equal(before[name], array) for name, array in weights(lab).items())


def test_the_base_below_an_adapter_sleeps_with_the_weights(lab: EngineFixture) -> None:
    base = lab.facts["fingerprint"]
    plain = lab.run(lab.engine.offload(["weights"]))
    lab.run(lab.engine.onload(["weights"]))
    lab.update(send(lab, 1, adapter(1, lab=lab), "lora", base))
    below = sum(tensor.nbytes for tensor in lab.engine._adapters._base.values())  # type: ignore[attr-defined]
    assert lab.run(lab.engine.offload(["weights"])) == plain + below > plain
    lab.run(lab.engine.onload(["weights"]))
    tensors = adapter(2, lab=lab)
    lab.update(send(lab, 2, tensors, "lora", base))
    for name, want in merged(lab, tensors).items():
        np.testing.assert_allclose(weights(lab)[name], want, atol=1e-6)


def test_a_rank_stabilised_adapter_counts_by_the_root_of_its_rank(lab: EngineFixture) -> None:
    lab.engine._spec.model["lora"] |= {"rslora": True}  # type: ignore[attr-defined]
    tensors = adapter(1, lab=lab)
    lab.update(send(lab, 1, tensors, "lora", lab.facts["fingerprint"]))
    base = {name: array for name, array, _ in tensors_of(lab.model)}
    for name, want in merged(lab, tensors).items():
        rescaled = base[name] + (want - base[name]) * np.sqrt(RANK)
        np.testing.assert_allclose(weights(lab)[name], rescaled, atol=1e-6)


def test_a_delta_over_an_adapter_is_refused_and_a_whole_model_ends_it(lab: EngineFixture) -> None:
    first = list(tensors_of(lab.other))
    lab.update(send(lab, 1, first))
    whole = send(lab, 1, first)
    lab.update(send(lab, 2, adapter(1, lab=lab), "lora", whole.fingerprint))
    lab.transport = Disk()
    send(lab, 2, first)
    with pytest.raises(ValueError, match="its base contains an adapter"):
        lab.update(send(lab, 3, moved(first, 1), "delta", str(at(2))))
    last = send(lab, 4, moved(first, 2))
    assert lab.update(last).resident == last.fingerprint


# -- canaries, and a publish that is killed ---------------------------------------------------------------------


def test_scores_are_of_logits_divided_by_the_temperature(lab: EngineFixture) -> None:
    plain = plain_log_probs(lab.model, PROMPT)
    for temperature in (1.0, 0.5):
        want = log_softmax(plain / temperature)[np.arange(len(PROMPT) - 1), list(PROMPT[1:])]
        (scores,) = lab.run(lab.engine.score([PROMPT], temperature))
        np.testing.assert_allclose(scores, [0.0, *want], atol=1e-4)
    with pytest.raises(ValueError, match=r"temperature 0\.0"):
        lab.run(lab.engine.score([PROMPT], 0.0))


HALF = """
import sys, time
from relax_core.api.weights import Version
from relax_core.testing.engine_fixture import tensors_of
from relax_core.tensor_files.transport import Disk

def stuck():
    for number, item in enumerate(tensors_of(sys.argv[1])):
        if number == 3:
            print("half way", flush=True)
            time.sleep(600)
        yield item

Disk().send(Version("actor", 0, 2), "full", "", stuck(), sys.argv[2])
"""


async def test_a_publish_killed_half_way_leaves_every_engine_on_one_whole_version(
    folders: tuple[str, str], tmp_path: Path
) -> None:
    workers, service = LocalWorkers(), WeightRegistry(SystemClock())
    updater = WeightUpdater(service, SystemClock(), "resident", 0.1, 60.0)
    chosen = Chosen("engine", "transformers")
    spec = EngineSpec({"path": folders[0], "dtype": "float32"}, CONTEXT)
    own, preload = TransformersEngine.capabilities, TransformersEngine.preload
    slots = [
        EngineSlot(name, chosen, spec, WorkerSpec(name, chosen, preload=preload), workers, own)
        for name in ("engine-0", "engine-1")
    ]
    location = str(tmp_path)
    try:
        await asyncio.gather(*(slot.start() for slot in slots))
        first = Disk().send(at(1), "full", "", tensors_of(folders[1]), location)
        await service.announce(first, DISK)
        await asyncio.gather(*(updater.update(slot, first, DISK) for slot in slots))
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", HALF, folders[0], location, stdout=PIPE)
        assert process.stdout is not None
        async with asyncio.timeout(60):
            await process.stdout.readline()
        process.kill()
        await process.wait()
        assert await service.newest("actor", at(1), 0.0) is None
        assert [name for name in os.listdir(location) if name[0] != "."] == [Path(first.location).name]
        assert {(await slot.health(60.0)).version for slot in slots} == {at(1)}
        after = Disk().send(Version("actor", 1, 1), "full", "", tensors_of(folders[0]), location)
        await service.announce(after, DISK)
        receipts = await asyncio.gather(*(updater.update(slot, after, DISK) for slot in slots))
        assert {receipt.resident for receipt in receipts} == {after.fingerprint}
        assert not [name for name in os.listdir(location) if name[0] == "."]
    finally:
        await workers.close()


async def test_an_engine_that_disagrees_with_the_canary_does_not_arrive(
    folders: tuple[str, str], tmp_path: Path
) -> None:
    workers, service = LocalWorkers(), WeightRegistry(SystemClock())
    updater = WeightUpdater(service, SystemClock(), "behaviour", 1e-3, 60.0)
    chosen = Chosen("engine", "transformers")
    spec = EngineSpec({"path": folders[0], "dtype": "float32"}, CONTEXT)
    worker = WorkerSpec("engine-0", chosen, env={"OMP_NUM_THREADS": "1"}, preload=TransformersEngine.preload)
    slot = EngineSlot("engine-0", chosen, spec, worker, workers, TransformersEngine.capabilities)
    temperature = 0.7
    said = log_softmax(plain_log_probs(folders[1], PROMPT) / temperature)
    canary = Canary(PROMPT, (0.0, *said[np.arange(len(PROMPT) - 1), list(PROMPT[1:])].tolist()), temperature)
    try:
        await slot.start()
        wrong = replace(Disk().send(at(1), "full", "", tensors_of(folders[0]), str(tmp_path)), canary=canary)
        await service.announce(wrong, DISK)
        with pytest.raises(InfrastructureError, match="canary"):
            await updater.update(slot, wrong, DISK)
        assert (slot.state.loaded, await service.receivers("actor")) == (at(0), {})
        right = replace(Disk().send(at(2), "full", "", tensors_of(folders[1]), str(tmp_path)), canary=canary)
        await service.announce(right, DISK)
        assert (await updater.update(slot, right, DISK)).level == "behaviour"
        assert await service.receivers("actor") == {"engine-0": at(2)}
    finally:
        await workers.close()


def test_weights_asleep_on_disk_have_no_name(
    lab: EngineFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that nothing is left of them when the process is killed."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = weights(lab)
    lab.run(lab.engine.offload(["weights"]))
    assert not list(tmp_path.iterdir())
    lab.run(lab.engine.onload(["weights"]))
    assert all(np.array_equal(before[name], array) for name, array in weights(lab).items())
