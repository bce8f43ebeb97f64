# SPDX-License-Identifier: Apache-2.0
"""The style measure refuses what it says it refuses, and lets good code pass."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

MEASURE = Path(__file__).parents[2] / ".ci" / "style.py"
HEAD = '# SPDX-License-Identifier: Apache-2.0\n"""A module."""\n'


def measure(folder: Path, code: str) -> tuple[int, str]:
    (folder / "noun.py").write_text(code)
    done = subprocess.run([sys.executable, MEASURE, folder], capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout + done.stderr


def long_function(lines: int) -> str:
    return "def work() -> None:\n" + "    pass\n" * (lines - 1)


def test_good_code_passes(tmp_path: Path) -> None:
    code, said = measure(tmp_path, HEAD + "def work(given: int, *more: str) -> None:\n    pass\n")
    assert (code, "noun.py" in said) == (0, False)


@pytest.mark.parametrize(
    ("code", "complaint"),
    [
        ('"""A module."""\n', "the first line is not"),
        ("# SPDX-License-Identifier: Apache-2.0\nx = 1\n", "no module docstring"),
        (HEAD + "def work(given) -> None:\n    pass\n", "no annotation of given"),
        (HEAD + "class A:\n    def work(self, *, key: int):\n        pass\n", "no annotation of the result"),
        (HEAD + long_function(81), "81 lines, over 80"),
        (HEAD + long_function(41), "one function in ten has over 41 lines"),
        (HEAD + long_function(13), "the median function has 13 lines"),
        (HEAD + "x = 1\n" * 400, "402 lines, over 400"),
    ],
)
def test_what_passes_a_bound_is_named(tmp_path: Path, code: str, complaint: str) -> None:
    status, said = measure(tmp_path, code)
    assert status == 1
    assert complaint in said
