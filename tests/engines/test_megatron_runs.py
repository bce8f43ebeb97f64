# SPDX-License-Identifier: Apache-2.0
"""Whole runs train with Megatron in an interpreter that `scripts/engine megatron` makes, split over two ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.conftest import MEGATRON
from tests.graph.ray_run import Start

SPLIT = ("placement.actor.ranks=2", "trainer.tensor_parallel=2", "trainer.sequence_parallel=true")


@pytest.mark.parametrize("runner", ["local", "ray"])
def test_the_quickstart_learns_on_two_ranks_as_its_engine_samples(start: Start, tmp_path: Path, runner: str) -> None:
    assert MEGATRON, "RELAX_ENGINE_MEGATRON names no interpreter"
    run = start.train(
        tmp_path / "run", "quickstart", "trainer=megatron", f"trainer.python={MEGATRON}", *SPLIT, "steps=60",
        f"run.runner={runner}", "eval.every=0",
    )  # fmt: skip
    assert run.end(280) == 0, run.err
    steps = run.steps()
    assert run.summary()["balanced"] and len(steps) == 60
    assert max(step["train/rollout_log_prob_diff_lag0_max"] for step in steps) < 1e-3
    rewards = [step["reward/mean"] for step in steps]
    assert sum(rewards[-20:]) / 20 > sum(rewards[:10]) / 10 + 0.05
