# SPDX-License-Identifier: Apache-2.0
"""Seeded schedules of faults over the real roles and services in virtual time lose nothing, and get done."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos.__main__ import environment

ROOT = Path(__file__).parents[2]
COUNT = 1000
SHARDS = 2
"""Tests that share the schedules, so that they run beside others."""


def chaos(*words: str) -> tuple[int, str]:
    """Run schedules in a process whose strings are hashed as in every other one."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.chaos", *words], cwd=ROOT, env=environment(), capture_output=True, text=True,
        timeout=280, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("shard", range(SHARDS))
def test_whatever_befalls_a_run_every_sample_counts_once_and_it_gets_done(shard: int) -> None:
    each = COUNT // SHARDS
    status, said = chaos("--first", str(shard * each), "--count", str(each))
    assert status == 0, said
    assert f"{each} schedules of 16 kinds" in said


def test_a_seed_replays_the_same_run() -> None:
    first, second = (chaos("--seed", "11") for _ in range(2))
    assert first == second and first[0] == 0
    assert "starts" in first[1] and len(first[1].splitlines()) > 2
