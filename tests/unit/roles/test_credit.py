# SPDX-License-Identifier: Apache-2.0
"""What the role that computes advantages gives to algorithms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from relax_core.learn import groups
from tests.unit.roles.simulated_run import SimulatedRun


def test_algorithms_get_the_signed_weights_of_the_runs_rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, float]] = []
    credited = groups.credited

    def listening(*args: Any) -> Any:
        seen.append(dict(args[-1]))
        return credited(*args)

    monkeypatch.setattr(groups, "credited", listening)
    rewards = [{"name": "scripted-reward", "weight": -0.5}, {"name": "scripted-reward", "label": "other"}]
    SimulatedRun(tmp_path, algorithm="gdpo", steps=1, rewards=rewards).run()
    assert seen and all(weights == {"scripted-reward": -0.5, "other": 1.0} for weights in seen)
