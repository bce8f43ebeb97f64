# SPDX-License-Identifier: Apache-2.0
"""Trainer and engine on a GPU: the engine takes the trainer's bytes, and whole runs learn in every placement of one GPU."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from relax_plugin_transformers.engine import TransformersEngine
from relax_plugin_transformers.options import TransformersOptions

from relax_core.api import Version
from relax_core.tensor_files.transport import Disk, SharedMemory
from relax_core.testing.engine_fixture import DISK, PROMPT, EngineFixture, tiny_qwen3
from relax_core.testing.trainer import forward, make_rows
from tests.graph.ray_run import Start
from tests.trainers import running, train

pytestmark = pytest.mark.gpu
DEVICE = "cuda"


@pytest.mark.parametrize("transport", [Disk, SharedMemory])
def test_an_engine_holds_the_bytes_that_a_trainer_publishes(tmp_path: Path, transport: type[Disk]) -> None:
    folder = tiny_qwen3(str(tmp_path / "model"), 1)
    engine = TransformersEngine(TransformersOptions(device=DEVICE))
    engine.build = lambda chosen: transport()
    place = TemporaryDirectory(dir="/dev/shm" if transport.same_host else None)
    with running(folder, options={"device": DEVICE}, transport=transport()) as trainer, place as location:
        lab = EngineFixture(engine, folder, folder).start(version=Version("actor", 0, 0))
        try:
            train(trainer)
            manifest = trainer.publish(Version("actor", 0, 1), DISK, location)
            assert lab.update(manifest).resident == manifest.fingerprint
            rows = make_rows(9)
            scores = lab.run(lab.engine.score([tuple(row.tolist()) for row in rows.columns["tokens"].rows()]))
            expected = forward(trainer, rows, 0).rows()
            for score, row, mask in zip(scores, expected, rows.columns["loss_mask"].rows(), strict=True):
                np.testing.assert_allclose(np.array(score)[mask == 1], row[mask == 1], rtol=0, atol=1e-4)
            (sampled,) = lab.generate(lab.request(PROMPT, 8, temperature=0.0))
            assert sampled.version == 1
        finally:
            lab.stop()


@pytest.mark.process
@pytest.mark.parametrize("placement", ["colocate", "hybrid", "async"])
def test_a_run_learns_as_its_engine_samples(start: Start, tiny: Path, tmp_path: Path, placement: str) -> None:
    run = start.train(
        tmp_path / "run", tiny / "recipe.toml", "steps=40", "run.runner=local", f"placement={placement}", "eval.every=0",
        f"trainer.device={DEVICE}", f"engine.device={DEVICE}",
    )  # fmt: skip
    assert run.end(600) == 0, run.err
    steps = run.steps()
    assert run.summary()["balanced"] and len(steps) == 40
    apart = [step[name] for step in steps for name in step if name == "train/rollout_log_prob_diff_lag0_max"]
    assert apart and max(apart) < 1e-3
    rewards = [step["reward/mean"] for step in steps]
    assert sum(rewards[-10:]) > sum(rewards[:10])
