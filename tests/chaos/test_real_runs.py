# SPDX-License-Identifier: Apache-2.0
"""A real run whose processes are killed, stopped and denied the disk gets done, and every sample counts once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.real_runs import MOMENTS, survive


def test_a_local_run_survives_whatever_befalls_its_processes(tmp_path: Path, tiny: Path) -> None:
    trace = survive(tmp_path, tiny / "recipe.toml", "local", seed=3, count=4, steps=60, moments=MOMENTS)
    assert len(trace) >= 5, trace
    assert any("at a recovery" in said for said in trace), trace


@pytest.mark.ray
def test_a_run_on_ray_survives_the_loss_of_what_can_be_replaced(tmp_path: Path, tiny: Path) -> None:
    """The driver and the hub are spared: without them it ends for a resume, which takes minutes."""
    spared, moments = ("driver", "Hub"), ("recovery", "checkpoint", "claim")
    trace = survive(tmp_path, tiny / "recipe.toml", "ray", seed=3, count=3, steps=24, spared=spared, moments=moments)
    assert len(trace) >= 4, trace
