# SPDX-License-Identifier: Apache-2.0
"""The suite's own script: what tests leave running is found, named and ended, and the suite fails for it."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import psutil

from tests.processes import gone

ROOT = Path(__file__).parents[2]
LEAVES_ONE = """
import subprocess

def test_leaves_a_process_behind():
    child = subprocess.Popen(["sleep", "300"], start_new_session=True)
    open("pid", "w").write(str(child.pid))
"""


def test_a_process_that_outlives_the_tests_fails_the_suite(tmp_path: Path) -> None:
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "suite", tmp_path / ".ci")
    shutil.copy(ROOT / "conftest.py", tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_some.py").write_text(LEAVES_ONE)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    more = {"PATH": path, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "RELAX_TEST_PROCESSES": "0"}
    done = subprocess.run(
        [tmp_path / ".ci" / "suite", "-p", "no:cacheprovider"],
        env={**os.environ, **more},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    pid = (tmp_path / "pid").read_text()
    said = done.stdout + done.stderr
    assert done.returncode == 1, said
    assert f"left running by the tests: {pid} sleep 300" in said
    with contextlib.suppress(psutil.NoSuchProcess, psutil.TimeoutExpired):  # a zombie is waited for in vain
        psutil.Process(int(pid)).wait(5)
    assert gone(int(pid))
