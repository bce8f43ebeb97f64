# SPDX-License-Identifier: Apache-2.0
"""Adapters on a base that sleeps, scores for a canary, and a publish that is killed."""

import asyncio
import os
import sys
from asyncio.subprocess import PIPE
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from relax_plugin_transformers.engine import TransformersEngine

from relax_core.api import Chosen, SystemClock, WorkerSpec
from relax_core.api.engine import EngineSpec
from relax_core.api.errors import InfrastructureError
from relax_core.api.weights import Canary, Version
from relax_core.engines.slot import EngineSlot
from relax_core.engines.supervisor import WeightUpdater
from relax_core.runners.local.workers import LocalWorkers
from relax_core.tensor_files.transport import Disk
from relax_core.testing.engine_fixture import (
    CONTEXT,
    LORA,
    PROMPT,
    EngineFixture,
    adapter,
    log_softmax,
    merged,
    plain_log_probs,
    tensors_of,
)
from relax_core.weights.registry import WeightRegistry

pytestmark = pytest.mark.one_process("engines")  # whose fork server loads torch once
DISK = Chosen("weight-transport", "disk")


def at(step: int) -> Version:
    return Version("actor", 0, step)


def weights(lab: EngineFixture) -> dict[str, np.ndarray]:
    held = lab.engine._weights  # type: ignore[attr-defined]
    return {name: np.array(held.value(name)) for name in held.tensors}


# -- adapters; `EngineSuite` tests that adapters and deltas give the right weights and that wrong ones are refused -----------


def test_the_base_below_an_adapter_sleeps_with_the_weights(lab: EngineFixture, tmp_path: Path) -> None:
    plain = lab.run(lab.engine.offload(["weights"]))
    lab.run(lab.engine.onload(["weights"]))
    lab.update(lab.publish_adapter(adapter(lab.model, 1)))
    below = sum(tensor.nbytes for tensor in lab.engine._adapters._base.values())  # type: ignore[attr-defined]
    assert lab.run(lab.engine.offload(["weights"])) == plain + below > plain
    lab.run(lab.engine.onload(["weights"]))
    tensors = adapter(lab.model, 2)
    lab.update(lab.publish_adapter(tensors))
    for name, want, _ in tensors_of(merged(lab.model, tensors, tmp_path / "merged")):
        np.testing.assert_allclose(weights(lab)[name], want, atol=1e-6)


def test_a_rank_stabilised_adapter_counts_by_the_root_of_its_rank(lab: EngineFixture, tmp_path: Path) -> None:
    lab.engine._spec.model["lora"] = {**LORA, "rslora": True}  # type: ignore[attr-defined]
    tensors = adapter(lab.model, 1)
    lab.update(lab.publish_adapter(tensors))
    base = {name: array for name, array, _ in tensors_of(lab.model)}
    for name, want, _ in tensors_of(merged(lab.model, tensors, tmp_path / "merged")):
        rescaled = base[name] + (want - base[name]) * np.sqrt(LORA["rank"])
        np.testing.assert_allclose(weights(lab)[name], rescaled, atol=1e-6)


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


def slot_of(folder: str, name: str, workers: LocalWorkers) -> EngineSlot:
    chosen = Chosen("engine", "transformers")
    worker = WorkerSpec(name, chosen, env={"OMP_NUM_THREADS": "1"}, preload=TransformersEngine.preload)
    spec = EngineSpec({"path": folder, "dtype": "float32"}, CONTEXT)
    return EngineSlot(name, chosen, spec, worker, workers, TransformersEngine.capabilities)


async def test_a_publish_that_is_killed_leaves_every_engine_on_one_complete_version(
    folders: tuple[str, str], tmp_path: Path
) -> None:
    workers, service = LocalWorkers(), WeightRegistry(SystemClock())
    updater = WeightUpdater(service, SystemClock(), "resident", 0.1, 60.0)
    slots, location = [slot_of(folders[0], name, workers) for name in ("engine-0", "engine-1")], str(tmp_path)
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
    slot, temperature = slot_of(folders[0], "engine-0", workers), 0.7
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
