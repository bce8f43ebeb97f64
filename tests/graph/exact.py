# SPDX-License-Identifier: Apache-2.0
"""A deterministic run without faults, and the check that a run with faults ends like it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from relax_core.views.run import open_run
from tests.graph.conftest import exported, relax_in

STEPS = 6
EXACT = (
    "rollout.groups_per_step=4", "rollout.group_size=4", f"steps={STEPS}", "checkpoint.every=2", "deterministic=true",
    "max_staleness=0", "placement=colocate", "checkpoint.keep=99", "export.every=4", "algorithm.kl_coef=0.1",
    "eval.every=4", "eval.sets.0.size=8",
)  # fmt: skip
SAME = ("reward/mean", "train/loss", "train/grad_norm", "tokens/trained", "lag/max")


def train_exactly(recipe: Path, run: Path, *more: str) -> None:
    """Train in one process of its own: what other tests set in torch may change the last bits."""
    with relax_in(run.parent) as relax:
        ran = relax("train", recipe, *EXACT, *more, "--runner", "inline", "--run-dir", run)
    assert ran.code == 0, ran.err


def assert_ends_like(whole: Path, run: Path, summary: dict[str, Any]) -> None:
    """Require the weights, steps and samples of the whole run, and that each sample counts once."""
    count = json.loads((whole / "summary.json").read_text())["steps"]
    assert summary["steps"] == count and summary["balanced"]
    assert summary["samples_trained"] == count * 16
    assert exported(run) == exported(whole)
    steps = steps_of(run)
    assert [step for step, *_ in steps] == list(range(1, count + 1))
    assert steps == steps_of(whole)
    assert _samples(run, count) == _samples(whole, count)


def steps_of(run: Path) -> list[tuple[Any, ...]]:
    """Return the number and the measures `SAME` of each step."""
    records = (json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines())
    return [(record["step"], *(record[key] for key in SAME)) for record in records if "reward/mean" in record]


def _samples(run: Path, count: int) -> dict[tuple[int, int, int], tuple[Any, ...]]:
    """Return the transcripts of trained samples by attempt."""
    view = open_run(run)
    samples = [sample for step in range(1, count + 1) for sample in view.samples(step) if "group_id" in sample]
    return {(s["group_id"], s["sample_index"], s["step"]): (s["prompt"], s["response"], s["reward"]) for s in samples}
