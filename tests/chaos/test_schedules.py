# SPDX-License-Identifier: Apache-2.0
"""Seeded schedules of faults over the real roles and services in virtual time lose nothing, and get done."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.chaos.__main__ import environment

ROOT = Path(__file__).parents[2]
COUNT = 1000


def chaos(*words: str) -> tuple[int, str]:
    """Run schedules in a process whose strings are hashed as in every other one."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.chaos", *words], cwd=ROOT, env=environment(), capture_output=True, text=True,
        timeout=600, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def test_whatever_befalls_a_run_every_sample_counts_once_and_it_gets_done() -> None:
    status, said = chaos("--count", str(COUNT))
    assert status == 0, said
    assert f"{COUNT} schedules of 16 kinds" in said
    assert " 0 of them" not in said, "some went on from what was saved in an emergency"


def test_a_seed_replays_the_same_run() -> None:
    first, second = (chaos("--seed", "11") for _ in range(2))
    assert first == second and first[0] == 0
    assert "starts" in first[1] and len(first[1].splitlines()) > 2
