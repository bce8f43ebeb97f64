# SPDX-License-Identifier: Apache-2.0
"""Whatever writes durable files may be killed, or lose its power, at any point: what it promised is there and whole."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos.__main__ import environment

ROOT = Path(__file__).parents[2]
EVERY = {"run": 3}
"""A run has many points, of which `tox -e chaos` looks at each; its last ones are those of its checkpoints."""


@pytest.mark.parametrize("names", ["run", "resume documents stages media", "export"])
def test_after_a_crash_at_any_point_files_are_whole_and_nothing_promised_is_lost(names: str) -> None:
    words = [sys.executable, "-m", "tests.chaos.crash_checks", *names.split(), "--every", str(EVERY.get(names, 1))]
    done = subprocess.run(words, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    points = [int(number) for number in re.findall(r": (\d+) crash points, 0 wrong", done.stdout)]
    assert len(points) == len(names.split()) and min(points) >= 15
