# SPDX-License-Identifier: Apache-2.0
"""Broken folders, broken weights and a broken decoding thread: told at once, and nothing wrong is served."""

import asyncio
import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from relax_plugin_transformers.batch import Batch
from relax_plugin_transformers.engine import TransformersEngine
from relax_plugin_transformers.weights import Resident

from relax_core.api.engine import EngineSpec
from relax_core.api.errors import ConfigError, InfrastructureError
from relax_core.api.weights import Manifest, Version
from relax_core.tensor_files.transport import Disk
from relax_core.testing.engine_fixture import (
    CONTEXT,
    PROMPT,
    PROMPTS,
    EngineFixture,
    agrees,
    gather,
    joined,
    tensors_of,
    until_known,
)

StartLab = Callable[..., EngineFixture]


def rewrite_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def drop_a_tensor(folder: Path) -> None:
    left = [(n, np.array(a), d) for n, a, d in tensors_of(str(folder)) if "layers.1.mlp.up_proj" not in n]
    manifest = Disk().send(Version("actor", 0, 0), "full", "", left, str(folder))
    Path(manifest.location).rename(folder / "model.safetensors")


DAMAGES: dict[str, Callable[[Path], object]] = {
    "no folder": shutil.rmtree,
    "no config": lambda folder: (folder / "config.json").unlink(),
    "malformed config": lambda folder: (folder / "config.json").write_text("{"),
    "a config that is a list": lambda folder: (folder / "config.json").write_text("[]"),
    "an unknown architecture": lambda folder: rewrite_config(folder, model_type="abacus"),
    "recurrent layers": lambda folder: rewrite_config(folder, layer_types=["linear_attention", "full_attention"]),
    "no weights": lambda folder: (folder / "model.safetensors").unlink(),
    "truncated weights": lambda folder: os.truncate(folder / "model.safetensors", 5000),
    "a tensor missing": drop_a_tensor,
}


@pytest.mark.parametrize("damage", DAMAGES)
async def test_broken_folder_is_a_configuration_error(folders: tuple[str, str], tmp_path: Path, damage: str) -> None:
    folder = Path(shutil.copytree(folders[0], tmp_path / "model"))
    DAMAGES[damage](folder)
    with pytest.raises(ConfigError, match="model.path") as refused:
        await TransformersEngine().start(EngineSpec(model={"path": str(folder)}, max_context=8))
    assert str(folder) in str(refused.value)


async def test_context_beyond_the_models_is_a_configuration_error(folders: tuple[str, str]) -> None:
    with pytest.raises(ConfigError, match=str(CONTEXT)):
        await TransformersEngine().start(EngineSpec(model={"path": folders[0]}, max_context=CONTEXT + 1))


async def test_engine_that_was_never_started_says_so(folders: tuple[str, str]) -> None:
    engine = TransformersEngine()
    assert not (await engine.health()).ok
    with pytest.raises(InfrastructureError, match="call start first"):
        engine.generate([])
    await engine.stop()


def test_overflowed_weights_end_requests_with_an_error(lab: EngineFixture) -> None:
    lab.update(lab.publish([(name, array * np.float32(np.nan), dtype) for name, array, dtype in tensors_of(lab.model)]))
    (got,) = lab.generate(lab.request(PROMPT, 5))
    assert (got.finish, got.tokens) == ("error", ())
    assert "finite" in got.error
    lab.update(lab.publish(source=lab.model))
    requests = [lab.request(prompt, 9, seed=i) for i, prompt in enumerate(PROMPTS)]
    for request, good in zip(requests, lab.generate(*requests), strict=True):
        agrees(lab.model, request.tokens, good)


def test_failed_swap_ends_the_engine_rather_than_serving_a_mixture(
    lab: EngineFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Resident.load

    def half(self: Resident, manifest: Manifest, staged: Iterator) -> None:
        parts = list(staged)
        with contextlib.suppress(ValueError):  # it misses the other half
            whole(self, manifest, iter(parts[: len(parts) // 2]))
        raise RuntimeError("the device fell off")

    monkeypatch.setattr(Resident, "load", half)
    with pytest.raises(RuntimeError, match="fell off"):
        lab.update(lab.publish())
    assert not lab.run(lab.engine.health()).ok
    with pytest.raises(InfrastructureError, match="fell off"):
        lab.generate(lab.request(PROMPT, 2))


def test_swap_that_loads_only_half_is_noticed_by_the_resident_proof(
    lab: EngineFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Resident.load

    def skips_one(self: Resident, manifest: Manifest, staged: Iterator) -> None:
        with contextlib.suppress(ValueError):
            whole(self, manifest, iter(list(staged)[1:]))

    monkeypatch.setattr(Resident, "load", skips_one)
    with pytest.raises(InfrastructureError, match="want"):
        lab.update(lab.publish())
    assert not lab.run(lab.engine.health()).ok


def test_tokens_that_were_sampled_arrive_before_the_thread_dies(
    folders: tuple[str, str], start_lab: StartLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = start_lab(*folders, options={"deltas_every": 2})
    step, steps = Batch.step, []

    def dies_late(self: Batch, model: object) -> None:
        steps.append(1)
        if len(steps) > 9:
            raise MemoryError("no room")
        step(self, model)

    monkeypatch.setattr(Batch, "step", dies_late)

    async def read() -> list:
        got = []
        with pytest.raises(InfrastructureError, match="no room"):
            async for deltas in lab.engine.generate([lab.request(PROMPT, 50, seed=1)]):
                got += deltas
        return got

    got = lab.run(read())
    tokens = tuple(token for delta in got for token in delta.tokens)
    assert len(tokens) >= 8
    monkeypatch.undo()
    other = start_lab(*folders)
    (whole,) = other.generate(other.request(PROMPT, 50, seed=1))
    assert whole.tokens[: len(tokens)] == tokens


def test_request_running_twice_is_refused(lab: EngineFixture) -> None:
    async def twice() -> None:
        await lab.engine.pause()
        request = lab.request(PROMPT, 5)
        running = asyncio.create_task(gather(lab.engine, [request]))
        await until_known(lab.engine, 1)
        with pytest.raises(ValueError, match="already running"):
            await gather(lab.engine, [request])
        await lab.engine.resume()
        assert len((await running)[0].tokens) == 5

    lab.run(twice())


def test_deterministic_engines_give_the_same_bits_in_any_batch(folders: tuple[str, str], start_lab: StartLab) -> None:
    results = []
    for company in (0, 3):
        lab = start_lab(*folders, deterministic=True)
        calls = [[lab.request(prompt, 7 + i, seed=i) for i, prompt in enumerate(PROMPTS)] for _ in range(company + 1)]

        async def all_of_them(lab: EngineFixture = lab, calls: list = calls) -> list:
            return await asyncio.gather(*(gather(lab.engine, call) for call in calls))

        *_, last = lab.run(all_of_them())
        results.append([(got.tokens, got.log_probs) for got in last])
    assert results[0] == results[1]


def test_update_while_weights_sleep_is_refused(lab: EngineFixture) -> None:
    lab.run(lab.engine.offload(["weights"]))
    with pytest.raises(ValueError, match="onload them first"):
        lab.update(lab.publish())
    with pytest.raises(ValueError, match="onload them first"):
        lab.run(lab.engine.score([PROMPT]))
    lab.run(lab.engine.onload(["weights"]))
    lab.update(lab.publish())
    (got,) = lab.generate(lab.request(PROMPT, 5))
    agrees(lab.other, PROMPT, got)


def test_pause_sends_what_was_sampled(lab: EngineFixture) -> None:
    async def pause_early() -> list:
        request = lab.request(PROMPT, 100, seed=1)
        stream = lab.engine.generate([request])
        parts = list(await anext(stream))
        await lab.engine.pause()
        held = await anext(stream)
        await lab.engine.resume()
        return parts + [*held] + [delta async for deltas in stream for delta in deltas]

    assert len(joined(lab.run(pause_early())).tokens) == 100


def test_long_lived_batch_drops_its_dead_columns(lab: EngineFixture) -> None:
    """Short requests that keep joining would push the shared column on for ever."""

    async def relay() -> None:
        async def runner(number: int) -> None:
            for turn in range(6):
                request = lab.request(PROMPTS[number], 20 + 7 * number, seed=turn)
                (got,) = await gather(lab.engine, [request])
            agrees(lab.model, request.tokens, got)

        await asyncio.gather(*(runner(number) for number in range(4)))

    lab.run(relay())
