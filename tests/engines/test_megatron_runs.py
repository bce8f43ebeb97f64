# SPDX-License-Identifier: Apache-2.0
"""Whole runs train with Megatron in an interpreter that `scripts/engine megatron` makes, split over two ranks.

Each engine proves every version, whole or adapters alone, and samples as the trainer computes.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from relax_core.views.run import open_run
from tests.engines.conftest import INTERPRETERS, MEGATRON
from tests.graph.conftest import Relax
from tests.graph.ray_run import Start

START_S = 300.0
"""Importing vLLM or SGLang reads gigabytes."""
SPREAD = ("placement.actor.ranks=2", "trainer.expert_parallel=2")
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


def test_a_mixture_learns_on_two_ranks_that_replay_the_experts_of_its_engine(start: Start, tmp_path: Path) -> None:
    run = start.train(
        tmp_path / "run", "experts", "trainer=megatron", f"trainer.python={MEGATRON}", *SPREAD,
        "run.runner=local", "steps=60", "eval.every=0",
    )  # fmt: skip
    assert run.end(280) == 0, run.err
    steps = run.steps()
    assert run.summary()["balanced"] and len(steps) == 60
    assert all(step["routing/replayed"] == 1 for step in steps)
    assert max(step["train/rollout_log_prob_diff_lag0_max"] for step in steps) < 1e-3
    rewards = [step["reward/mean"] for step in steps]
    assert sum(rewards[-20:]) / 20 > sum(rewards[:10]) / 10 + 0.05
    published = [event for event in open_run(tmp_path / "run").events() if event["event"] == "weights published"]
    assert [event["version"] for event in published] == [f"actor@0.{step}" for step in range(1, 61)]
    assert all(event["receivers"] == ["engine-0"] for event in published)


@pytest.mark.parametrize(
    ("recipe", "layout"), [("colours", SPLIT), ("tones", SPREAD)], ids=["pictures", "sound and experts"]
)
def test_two_ranks_learn_to_see_and_to_hear_as_their_engine_samples(
    relax: Relax, tmp_path: Path, recipe: str, layout: tuple[str, ...]
) -> None:
    ran = relax(
        "train", recipe, "--runner", "local", "--run-dir", tmp_path / "run", "trainer=megatron",
        f"trainer.python={MEGATRON}", *layout, timeout_s=START_S,
    )  # fmt: skip
    assert ran.code == 0, ran.err
    run = open_run(tmp_path / "run")
    assert run.summary()["balanced"] and len(run.metrics().column("reward/mean")) == 60
    assert max(run.metrics().column("train/rollout_log_prob_diff_lag0_max")) < 1e-3
    shares = run.metrics().column("eval/held-out/mean")
    assert shares[-1] > shares[0] + 0.1


ADAPTERS = ("model.lora.rank=8", "optimizer.lr=5e-3")
ROUNDED = (*ADAPTERS, "model.dtype=bfloat16", "rollout.dtype=float32")
"""The engine loads the float32 folder exactly, and the trainer rounds it."""


@pytest.mark.parametrize(
    ("engine", "weights", "apart"),
    [
        ("transformers", ADAPTERS, 1e-3), ("transformers", ROUNDED, 0.3), ("vllm", (), 1e-3), ("vllm", ADAPTERS, 1e-3),
        ("sglang", (), 1e-3), ("sglang", ADAPTERS, 1e-3),
    ],
    ids=["transformers adapters", "transformers rounded", "vllm", "vllm adapters", "sglang", "sglang adapters"],
)  # fmt: skip
def test_engines_prove_the_versions_that_two_ranks_publish(
    relax: Relax, tiny: Path, tmp_path: Path, engine: str, weights: tuple[str, ...], apart: float
) -> None:
    python = (f"engine={engine}", f"engine.python={INTERPRETERS[engine]}") if engine in INTERPRETERS else ()
    ran = relax(
        "train", tiny / "recipe.toml", "--runner", "local", "--run-dir", tmp_path / "run", "trainer=megatron",
        f"trainer.python={MEGATRON}", *SPLIT, *python, *weights, "steps=4", "eval.every=0", "optimizer.warmup_steps=0",
        timeout_s=START_S,
    )  # fmt: skip
    assert ran.code == 0, ran.err
    run = open_run(tmp_path / "run")
    differences = run.metrics().column("train/rollout_log_prob_diff_lag0_max")
    assert len(differences) == 4 and max(differences) < apart
    proved = [event for event in run.events() if event["event"] == "weights published"]
    assert [event["version"] for event in proved] == [f"actor@0.{step}" for step in range(1, 5)]
    assert all(event["receivers"] == ["engine-0"] for event in proved)
    whole = sum(file.stat().st_size for file in (tiny / "model").glob("*.safetensors"))
    assert all((event["size_bytes"] < whole / 2) == bool(weights) for event in proved)
    assert run.summary()["balanced"] and not run.summary()["restarts"].get("engine")
