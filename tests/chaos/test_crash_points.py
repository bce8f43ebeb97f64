# SPDX-License-Identifier: Apache-2.0
"""A writer of durable files may be killed, or lose its power, at any point: what it promised is on the disk and whole.

`tox -e faults -- crash-points` looks at every point of every writer.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos.__main__ import environment

pytestmark = pytest.mark.process
ROOT = Path(__file__).parents[2]
EVERY = {"run": 7, "resume": 3, "documents": 9, "stages": 7, "media": 5, "export": 9}
"""Every which point of a sequence is looked at. Odd, so that points before and after an operation take turns."""
LEAST = {"run": 10, "resume": 7, "documents": 7, "stages": 4, "media": 3, "export": 4}
"""Points that must have been looked at."""


def test_after_a_crash_at_any_point_files_are_whole_and_nothing_promised_is_lost() -> None:
    words = [sys.executable, "-m", "tests.chaos.crash_checks", *(f"{name}:{every}" for name, every in EVERY.items())]
    done = subprocess.run(words, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    points = {name: int(number) for name, number in re.findall(r"(\w+): (\d+) crash points, 0 wrong", done.stdout)}
    assert points.keys() == EVERY.keys()
    assert {name: points[name] for name in EVERY if points[name] < LEAST[name]} == {}
