# SPDX-License-Identifier: Apache-2.0
"""Processes of a run on Ray are killed and replaced in place, the actor's with its ranks; more is in `test_killed_anywhere`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.graph.ray_run import Running, Start, children, kill, named, until

pytestmark = pytest.mark.ray


def test_killed_processes_are_replaced_in_place_and_the_ledger_balances(
    start: Start, tiny: Path, tmp_path: Path
) -> None:
    path = tmp_path / "run"
    run = start.train(path, tiny / "recipe.toml", "steps=400", "checkpoint.every=2")
    run.until_steps(2)
    until(lambda: children(run.process.pid, "ServeController"), "Serve's controller")[0].kill()
    run.until_more_steps()

    kill(named(run.pid("rollout"), "reward-exact-0")[-1])
    run.until_more_steps()

    def engine() -> dict[str, Any]:
        return dict(run.role("rollout").get("facts", {}).get("engines", {}).get("engine-0", {}))

    killed = run.fact("rollout", "engines")["engine-0"]["pid"]
    kill(killed)
    run.until_more_steps()
    pid = until(lambda: engine().get("pid") not in (None, killed) and engine()["pid"], "another engine")

    _kill_role(run, "advantages")
    _kill_role(run, "rollout")
    until(lambda: not psutil.pid_exists(pid), "the engine ends with its role")
    pid = until(engine, "the engine of the next rollout")["pid"]
    _kill_role(run, "actor")
    assert until(engine, "the engines")["pid"] == pid, "rollout continues while the actor restarts"
    run.interrupt()
    assert run.end() == 130, run.err
    until(lambda: not psutil.pid_exists(pid), "the engine ends with the run")
    assert f"relax resume {path}" in run.err
    summary = run.summary()
    assert (path / "checkpoints" / f"step-{summary['steps']:06d}" / "state.json").is_file(), "Ctrl-C saves"
    assert summary["restarts"]["advantages"] == 1
    assert summary["restarts"]["rollout"] == 1
    assert summary["restarts"]["engine"] == 1
    assert summary["restarts"]["actor"] == 1 and "run" not in summary["restarts"]
    back = re.search(r"rolled back +step=(\d+) version=actor@1", run.err)
    assert back and int(back[1]) > 0, "to its newest checkpoint"
    assert [row["step"] for row in run.steps()] == list(range(1, summary["steps"] + 1))
    assert re.search(r"rollout works again: after \d", run.err)
    assert run.out == ""
    for row in run.steps():
        assert row["samples/balanced"] == 1
        assert row["samples/issued"] == row["samples/trained"] + row["samples/dropped"] + row["samples/in_flight"]
        assert 0 <= row["lag/max"] <= 1


def _kill_role(run: Running, role: str) -> None:
    """SIGKILL the replica and wait until another plays."""
    pid = run.pid(role)
    kill(pid)
    until(lambda: run.role(role).get("pid") not in (None, pid), f"another {role}\n{run.err}")
    run.until_more_steps()
