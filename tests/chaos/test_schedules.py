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
COUNT = 100


def chaos(*words: str) -> tuple[int, str]:
    """Run schedules in a process of their own, whose hash seed is fixed; return its exit code and output."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.chaos", *words], cwd=ROOT, env=environment(), capture_output=True, text=True,
        timeout=600, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("first", [0, COUNT])
def test_under_any_schedule_every_sample_counts_once_the_run_finishes_and_its_seed_replays_it(first: int) -> None:
    status, said = chaos("--first", str(first), "--count", str(COUNT), "--again")
    assert status == 0, said
    assert f"{COUNT} schedules of {len(VARIANTS)} kinds" in said
    assert f"replayed seed {first}, " in said
