# SPDX-License-Identifier: Apache-2.0
"""A cluster of a run's own is started once more where Ray's node did not come up in time, and only there."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

import pytest

ray = pytest.importorskip("ray")

from relax_core.runners.ray.reaper import LET_S, LOOK_S, Reaper  # noqa: E402
from relax_core.runners.ray.runner import Cluster  # noqa: E402 (it imports Ray)


@pytest.mark.parametrize(
    ("errors", "tries"),
    [(["The current node timed out during startup."], 2), (["timed out during startup"] * 2, 2), (["no room"], 1)],
)
def test_a_node_that_does_not_come_up_in_time_is_started_once_more(
    monkeypatch: pytest.MonkeyPatch, errors: list[str], tries: int
) -> None:
    tried: list[dict[str, Any]] = []

    def init(**options: Any) -> None:
        tried.append(options)
        if len(tried) <= len(errors):
            raise Exception(errors[len(tried) - 1])

    monkeypatch.setattr(ray, "init", init)
    cluster = Cluster()
    cluster.ours = True
    try:
        if len(errors) == 1 and tries == 2:
            cluster._start_or_join()
        else:
            with pytest.raises(Exception, match=errors[-1]):
                cluster._start_or_join()
    finally:
        cluster._disconnect()
    assert len(tried) == tries
    assert all(options["address"] == "local" for options in tried)


def test_what_ran_before_ray_is_not_ended_with_it() -> None:
    sleeping = [sys.executable, "-c", "import time; time.sleep(60)"]
    before = subprocess.Popen(sleeping)
    reaper = Reaper.start()
    rays = subprocess.Popen(sleeping)
    try:
        time.sleep(8 * LOOK_S)  # it starts, and looks
        reaper.close()
        assert rays.wait(20 * LET_S) != 0
        assert before.poll() is None
    finally:
        for process in (before, rays):
            process.kill()
            process.wait()
