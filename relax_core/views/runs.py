# SPDX-License-Identifier: Apache-2.0
"""The runs of a folder at a glance: state, steps, reward. Reads the small files only where they say enough."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from relax_core.observe.run_directory import run_paths, runs_root
from relax_core.views.health import health
from relax_core.views.run import RunView


@dataclass(frozen=True, slots=True)
class Listed:
    """One line of `relax runs`."""

    name: str
    path: str
    state: str
    step: int
    steps: int | None
    reward_first: float | None
    reward_last: float | None
    eval_last: float | None
    wall_seconds: float | None


def list_runs(wall: float, root: Path | None = None) -> list[Listed]:
    """Runs under `root`, newest first."""
    return [listed(RunView(path), wall) for path in run_paths(root or runs_root())]


def listed(run: RunView, wall: float) -> Listed:
    """One run at a glance."""
    state, summary, status = health(run, wall), run.summary(), run.status()
    # A resumed run still has the summary of its last end.
    final = summary if state.ended else {}
    rewards = run.metrics().column("reward/mean") if not final else []
    evaluated = final.get("eval_last") or {}
    return Listed(
        name=run.name,
        path=str(run.path),
        state=state.state,
        step=int(final.get("steps", status.get("step", 0))),
        steps=status.get("steps"),
        reward_first=final.get("reward_first") if final else _mean(rewards[:10]),
        reward_last=final.get("reward_last") if final else _mean(rewards[-10:]),
        eval_last=evaluated.get("mean"),
        wall_seconds=final.get("wall_seconds"),
    )


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
