# SPDX-License-Identifier: Apache-2.0
"""A deterministic run that nobody touches, and what another one that is struck must end with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from relax_core.views.run import open_run
from tests.graph.conftest import exported

STEPS = 16
EXACT = (
    "rollout.prompts_per_step=4", "rollout.group_size=4", f"steps={STEPS}", "checkpoint.every=4", "deterministic=true",
    "max_staleness=0", "placement=colocate", "checkpoint.keep=99",
)  # fmt: skip
SAME = ("reward/mean", "train/loss", "train/grad_norm", "tokens/trained", "lag/max")


def assert_ends_like(whole: Path, run: Path, summary: dict[str, Any]) -> None:
    """Require the weights, steps and samples of the whole run, and that each sample counts once."""
    assert summary["steps"] == STEPS and summary["balanced"]
    assert summary["samples_trained"] == STEPS * 16
    assert exported(run) == exported(whole)
    told = _steps(run)
    assert [step for step, *_ in told] == list(range(1, STEPS + 1))
    assert told == _steps(whole)
    assert _samples(run) == _samples(whole)


def _steps(run: Path) -> list[tuple[Any, ...]]:
    records = (json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines())
    return [(record["step"], *(record[key] for key in SAME)) for record in records if "reward/mean" in record]


def _samples(run: Path) -> dict[tuple[int, int, int], tuple[Any, ...]]:
    """Transcripts by attempt."""
    view = open_run(run)
    samples = [sample for step in range(1, STEPS + 1) for sample in view.samples(step)]
    return {(s["group_id"], s["sample_index"], s["step"]): (s["prompt"], s["response"], s["reward"]) for s in samples}
