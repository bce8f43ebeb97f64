# SPDX-License-Identifier: Apache-2.0
"""A whole run whose weights go from memory to memory; an engine that dies is served while the actor waits for its rows."""

from __future__ import annotations

from pathlib import Path

from tests.graph.gated import gated, open_gate, shut
from tests.graph.ray_run import Start, kill

LIVE = ("weights=collective", "weights.payload=delta", "weights.silence_s=10", "run.runner=local", "steps=8")


def test_live_deltas_reach_the_engine_and_the_one_that_replaces_it(start: Start, tiny: Path, tmp_path: Path) -> None:
    shut(tmp_path / "run", 4)
    run = start.train(tmp_path / "run", tiny / "recipe.toml", *LIVE, *gated(tmp_path / "run"))
    run.until_steps(2)
    kill(run.fact("rollout", "engines")["engine-0"]["pid"])
    open_gate(tmp_path / "run")
    assert run.end() == 0, run.err
    summary = run.summary()
    assert (summary["status"], summary["steps"], summary["restarts"]) == ("finished", 8, {"engine": 1})
    assert summary["balanced"] and summary["max_lag"] == 0
    assert not (tmp_path / "run" / "weights").exists() or list((tmp_path / "run" / "weights").iterdir()) == []
