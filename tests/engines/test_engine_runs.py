# SPDX-License-Identifier: Apache-2.0
"""Whole runs with real engines: they learn from what it samples, and an engine that is killed costs time only."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

from tests.engines.conftest import INTERPRETERS
from tests.graph.conftest import Relax
from tests.graph.ray_run import Start, kill

START_S = 300.0
"""Importing one of these engines reads gigabytes, and a replaced one imports again."""


@pytest.mark.parametrize("engine", INTERPRETERS)
@pytest.mark.parametrize("runner", ["local", "ray"])
def test_a_killed_engine_is_replaced_and_the_ledger_balances(
    start: Start, tiny: Path, tmp_path: Path, engine: str, runner: str
) -> None:
    python = INTERPRETERS[engine]
    assert python, f"RELAX_ENGINE_{engine.upper()} names no interpreter"
    run = start.train(
        tmp_path / "run", tiny / "recipe.toml", "steps=14", f"run.runner={runner}", f"engine={engine}",
        f"engine.python={python}", "placement=async", "max_staleness=2", "eval.every=14", "checkpoint.every=0",
    )  # fmt: skip
    run.until_steps(4, START_S)
    kill(run.fact("rollout", "engines")["engine-0"]["pid"])
    assert run.end(280) == 0, run.err
    summary, steps = run.summary(), run.steps()
    assert summary["balanced"] and summary["restarts"].get("engine", 0) >= 1
    assert summary["max_lag"] <= 2 and len(steps) == 14
    same = [
        step["train/rollout_log_prob_diff_lag0_max"] for step in steps if "train/rollout_log_prob_diff_lag0_max" in step
    ]
    assert max(same, default=0.0) < 1e-3


DRAFTS = ("engine.draft_tokens=3", "rollout.max_new_tokens=24")


@pytest.mark.parametrize(
    ("engine", "weights"),
    [
        *product(INTERPRETERS, [("model.lora.rank=4",), ("weights.payload=delta", "engine.keep_weights=true")]),
        ("vllm", ("engine.tensor_parallel=2",)),
        ("vllm", DRAFTS),
    ],
)
def test_adapters_and_deltas_are_published_and_each_is_proved(
    relax: Relax, tiny: Path, tmp_path: Path, engine: str, weights: tuple[str, ...]
) -> None:
    run = tmp_path / "run"
    ran = relax(
        "train", tiny / "recipe.toml", "--runner", "local", "--run-dir", run, f"engine={engine}",
        f"engine.python={INTERPRETERS[engine]}", "steps=4", "eval.every=0", "optimizer.lr=5e-3",
        "optimizer.warmup_steps=0", *weights, timeout_s=START_S,
    )  # fmt: skip
    assert ran.code == 0, ran.err
    summary = json.loads((run / "summary.json").read_text())
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    apart = [step["train/rollout_log_prob_diff_lag0_max"] for step in steps if "reward/mean" in step]
    assert len(apart) == 4 and max(apart) < 1e-3
    assert summary["balanced"] and not summary["restarts"].get("engine")
    shares = [step["engines/draft_acceptance"] for step in steps if "engines/draft_acceptance" in step]
    assert bool(shares) == (weights is DRAFTS) and all(0 <= share <= 1 for share in shares)


@pytest.mark.parametrize("engine", INTERPRETERS)
def test_an_interpreter_without_the_engine_says_what_to_install(relax: Relax, tiny: Path, engine: str) -> None:
    ran = relax("train", tiny / "recipe.toml", "--runner", "local", f"engine={engine}", "steps=2")
    assert ran.code in (2, 4), ran.err
    assert f"pip install 'relax-plugin-{engine}[{engine}]'" in ran.err


@pytest.mark.parametrize("engine", INTERPRETERS)
def test_the_benchmark_measures_an_engine_beside_its_own_call(tmp_path: Path, engine: str) -> None:
    measure = [sys.executable, "-m", "tests.benchmarks", "engines", "--anyway", "--repeats", "1"]
    one = ["--engines", engine, f"--{engine}-python", INTERPRETERS[engine], "--sizes", "200k", "--at-once", "16"]
    subprocess.run([*measure, *one, "--out", str(tmp_path)], check=True, timeout=START_S)
    (row,) = json.loads((tmp_path / "engines.json").read_text())["rows"]
    assert row["engine"] == engine and row["of its own"] > 0
