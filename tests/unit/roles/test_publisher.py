# SPDX-License-Identifier: Apache-2.0
"""What a publisher sends and frees: deltas between full versions, nothing that a receiver may still be reading."""

from __future__ import annotations

import asyncio
import os
import threading
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from relax_core.api.batch import Ragged, RowBatch
from relax_core.api.component import Chosen
from relax_core.api.errors import InfrastructureError
from relax_core.api.role import SystemClock
from relax_core.api.weights import Manifest, Payload, Receipt, Version
from relax_core.roles.publisher import Publisher
from relax_core.tensor_files.transport import Disk
from relax_core.weights.registry import WeightRegistry

DISK = Chosen("weight-transport", "disk")


def at(step: int) -> Version:
    return Version("actor", 0, step)


@dataclass
class OneTensor:
    """A trainer group of one tensor that counts; `breaks` fails the next publish half way."""

    transport: Disk = field(default_factory=Disk)
    value: float = 0.0
    breaks: bool = False
    size: int = 2
    facts: dict[str, Any] = field(default_factory=lambda: {"vocab_size": 9, "max_context": 20})

    async def publish(
        self, version: Version, transport: Chosen, location: str, payload: Payload, base: str
    ) -> Manifest:
        def tensors() -> Any:
            yield "weight", np.arange(1000, dtype=np.float32) + np.float32(self.value), "F32"
            if self.breaks:
                raise RuntimeError("the rank died")

        return self.transport.send(version, payload, base, tensors(), location)

    async def forward(self, rows: RowBatch, columns: tuple[str, ...]) -> dict[str, Ragged]:
        tokens = rows.columns["tokens"]
        assert len(rows) == self.size and columns == ("log_probs",)
        return {"log_probs": Ragged(-tokens.values.astype(np.float32), tokens.lengths)}


@dataclass
class Stage:
    publisher: Publisher
    trainer: OneTensor
    service: WeightRegistry
    directory: Path

    async def publish(self, step: int) -> Manifest:
        self.trainer.value += 1
        return await self.publisher.publish(at(step), applied=True)

    def files(self) -> list[str]:
        return sorted(os.listdir(self.directory / "weights"))


def stage(directory: Path, transport: Disk | None = None, alone: bool = False, **settings: Any) -> Stage:
    keys = {"chosen": DISK, "payload": "delta", "full_every": 3, "proof": "auto", **settings}
    service, trainer = WeightRegistry(SystemClock()), OneTensor()
    context: Any = SimpleNamespace(
        config=SimpleNamespace(weights=SimpleNamespace(**keys), rollout=SimpleNamespace(temperature=0.7)),
        plan=SimpleNamespace(adapters_alone=alone), run_id="a", run_dir=str(directory), weights=service,
        build=lambda chosen, contract: transport or Disk(),
    )  # fmt: skip
    group: Any = trainer
    return Stage(Publisher(context, group), trainer, service, directory)


async def test_adapters_go_out_alone_on_their_base_every_time(tmp_path: Path) -> None:
    on = stage(tmp_path, alone=True)
    on.trainer.facts["base"] = "the base model"
    for step in (1, 2, 3, 4, 5):
        manifest = await on.publish(step)
        assert (manifest.payload, manifest.base) == ("lora", "the base model")


async def test_every_so_often_a_full_version_and_deltas_between(tmp_path: Path) -> None:
    on = stage(tmp_path)
    sent = [await on.publish(step) for step in range(1, 8)]
    assert [one.payload for one in sent] == ["full", "delta", "delta", "full", "delta", "delta", "full"]
    assert [one.base for one in sent[:3]] == ["", "actor@0.1", "actor@0.2"]
    assert on.files() == ["actor@0.7.safetensors"]


async def test_a_version_stays_until_its_receiver_has_proved_it(tmp_path: Path) -> None:
    on = stage(tmp_path, payload="full")
    first = await on.publish(1)
    assert first.payload == "full"
    await on.service.route("actor", None, 0.0, None, "engine-0", 60.0)
    assert (await on.publish(2)).payload == "full"
    assert on.files() == ["actor@0.1.safetensors", "actor@0.2.safetensors"]
    await on.service.receipt(Receipt("engine-0", at(1), "wire", first.wire_fingerprint))
    await on.publish(3)
    assert on.files() == ["actor@0.3.safetensors"]


async def test_after_a_publish_that_failed_comes_a_full_version(tmp_path: Path) -> None:
    on = stage(tmp_path)
    await on.publish(1)
    on.trainer.breaks = True
    with pytest.raises(RuntimeError, match="the rank died"):
        await on.publish(2)
    on.trainer.breaks = False
    assert (await on.publish(2)).payload == "full"


async def test_an_update_that_changed_nothing_is_not_announced(tmp_path: Path) -> None:
    on = stage(tmp_path)
    await on.publish(1)
    with pytest.raises(InfrastructureError, match="tensors equal"):
        await on.publisher.publish(at(2), applied=True)
    newest = await on.service.newest("actor", None, 0.0)
    assert newest is not None and newest[0].version == at(1)


async def test_a_canary_travels_with_its_temperature_where_behaviour_is_to_be_proved(tmp_path: Path) -> None:
    assert (await stage(tmp_path / "a").publish(1)).canary is None
    first, second = [await stage(tmp_path / name, proof="behaviour").publish(1) for name in "bc"]
    canary = first.canary
    assert canary is not None and canary == second.canary
    assert canary.temperature == 0.7
    assert canary.log_probs == (0.0, *(-float(token) for token in canary.tokens[1:]))
    assert len(canary.tokens) == 20 and set(canary.tokens) <= set(range(9))


async def test_a_sender_that_is_slow_to_free_a_version_holds_no_one_up(tmp_path: Path) -> None:
    loop = asyncio.get_running_loop()
    went_on = threading.Event()

    class Slow(Disk):
        def release(self, manifest: Manifest) -> None:
            loop.call_soon_threadsafe(went_on.set)
            assert went_on.wait(10.0), "the event loop stood still meanwhile"
            super().release(manifest)

    on = stage(tmp_path, Slow(), payload="full")
    await on.publish(1)
    await on.publish(2)
    assert went_on.is_set() and on.files() == ["actor@0.2.safetensors"]
