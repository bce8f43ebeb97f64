# SPDX-License-Identifier: Apache-2.0
"""`relax why` names the engine that hangs, then the reward that does not answer; Ctrl-C then saves the run and ends it."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.graph.conftest import Relax
from tests.graph.ray_run import Start, until
from tests.processes import stop

pytestmark = pytest.mark.process
STUCK = """
import pathlib, time

from relax_core.api import Reward

GATE = pathlib.Path(__file__).with_name("closed")


class StuckReward(Reward):
    def score(self, task, trajectory):
        while GATE.exists():
            time.sleep(0.02)
        return float(len(trajectory.response) % 2)
"""


def test_the_engine_and_then_the_reward_that_hangs_is_named(
    start: Start, relax_here: Relax, tiny: Path, tmp_path: Path
) -> None:
    (tmp_path / "stuck.py").write_text(STUCK)
    run = start.train(
        tmp_path / "run", tiny / "recipe.toml", "steps=500", "run.runner=local", f"plugins=['{tmp_path / 'stuck.py'}']",
        'rewards=[{name="stuck", timeout_s=3000}]', "placement.rollout.silence_s=3000",
    )  # fmt: skip
    run.until_steps(2)

    def why() -> dict[str, Any]:
        return relax_here("why", run.path, "--json").json

    engine = run.fact("rollout", "engines")["engine-0"]["pid"]
    stop(engine)
    try:
        found = until(lambda: said if (said := why())["culprit"] == "engine-0" and said["waits"] else None, str(why()))
    finally:
        os.kill(engine, signal.SIGCONT)
    assert [link["who"] for link in found["chain"]] == ["actor", "rollout", "engine-0"]
    assert any(line.startswith("engine-0 (version actor@0.") for line in found["details"])
    (tmp_path / "closed").touch()
    until(lambda: why()["culprit"] == "reward stuck", "the reward is named")
    (tmp_path / "closed").unlink()
    run.until_more_steps()
    run.interrupt()  # to every process of the terminal
    assert run.end() == 130 and "Traceback" not in run.err, run.err
    assert run.summary()["status"] == "stopped" and run.steps()[-1]["samples/balanced"] == 1
    assert list((run.path / "checkpoints").glob("step-*/state.json"))
