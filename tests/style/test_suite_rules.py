# SPDX-License-Identifier: Apache-2.0
"""With `--no-skips` the suite fails on a skipped test, alone and over several processes. Tests for more GPUs than the process
sees are left out and counted. Tests that start Ray share a process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SKIPS = """
import pytest

def test_runs():
    pass

@pytest.mark.gpu
def test_needs_a_gpu():
    open("ran", "a").write("1")

@pytest.mark.gpu(2)
def test_needs_two_gpus():
    open("ran", "a").write("2")
"""
ALSO = """
@pytest.mark.ray
def test_skipped_for_another_reason():
    pytest.skip("no Ray")
"""

CLUSTERS = """
import os, pytest

@pytest.mark.ray
@pytest.mark.parametrize("number", range(4))
def test_starts_a_cluster(number):
    with open("processes", "a") as file:
        print(os.getpid(), file=file)
"""

DIES = """
import os, warnings

def note():
    with open("processes", "a") as file:
        print(os.getpid(), file=file)

def test_before():
    warnings.warn("shown by the parent")
    note()

def test_dies():
    os._exit(7)

def test_after(tmp_path):
    note()
"""


def suite(folder: Path, code: str, *arguments: str, gpus: str = "") -> tuple[int, str]:
    (folder / "conftest.py").write_text((ROOT / "conftest.py").read_text())
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n    gpu\n    ray\n")
    (folder / "test_some.py").write_text(code)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    env = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": gpus,
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # plugins cost each process a second
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=600, check=False)
    return done.returncode, done.stdout + done.stderr


def test_tests_for_more_gpus_than_there_are_are_left_out_and_counted(tmp_path: Path) -> None:
    status, said = suite(tmp_path, SKIPS, "--no-skips", "-n", "0")
    assert (status, "left out for want of GPUs: 2" in said, (tmp_path / "ran").exists()) == (0, True, False)
    status, said = suite(tmp_path, SKIPS + ALSO, "-n", "0", gpus="0")  # without the flag a skip is left alone
    assert (status, "left out for want of GPUs: 1" in said, (tmp_path / "ran").read_text()) == (0, True, "1")


def test_over_several_processes_a_skip_fails_and_tests_that_start_ray_share_a_process(tmp_path: Path) -> None:
    """Name a skipped test and a file that is skipped whole."""
    (tmp_path / "test_other.py").write_text('import pytest\npytest.importorskip("not_there")\n')
    status, said = suite(tmp_path, SKIPS + ALSO + CLUSTERS, "--no-skips", "-n", "2")
    assert status == 1
    assert "test_skipped_for_another_reason" in said and "skipped: test_other.py" in said
    assert "left out for want of GPUs: 2" in said
    assert len(set((tmp_path / "processes").read_text().split())) == 1


def test_a_process_that_dies_fails_its_test_and_the_rest_of_the_group_still_runs(tmp_path: Path) -> None:
    status, said = suite(tmp_path, DIES, "-n", "1")
    assert status == 1 and "2 passed, 1 failed" in said.replace("1 failed, 2 passed", "2 passed, 1 failed"), said
    assert "test_dies" in said and "the process of this test ended with 7" in said
    assert "UserWarning: shown by the parent" in said
    before, after = (tmp_path / "processes").read_text().split()
    assert before != after
