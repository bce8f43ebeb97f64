# SPDX-License-Identifier: Apache-2.0
"""Seeded schedules of faults over the real roles and services in virtual time lose nothing and finish all steps.

`tox -e faults -- schedules` runs 10,000 of them.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos.__main__ import environment
from tests.chaos.schedule import VARIANTS

pytestmark = pytest.mark.process
ROOT = Path(__file__).parents[2]
COUNT = 40
"""The fewest seeds from 0 among which each kind of run is drawn."""


def test_under_any_schedule_every_sample_counts_once_the_run_finishes_and_its_seed_replays_it() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.chaos", "--count", str(COUNT), "--again"], cwd=ROOT, env=environment(),
        capture_output=True, text=True, timeout=840, check=False,
    )  # fmt: skip
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert f"{COUNT} schedules of {len(VARIANTS)} kinds" in said
    assert "replayed seed 0, " in said
