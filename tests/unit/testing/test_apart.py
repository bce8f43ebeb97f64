# SPDX-License-Identifier: Apache-2.0
"""The processes in which the conformance kit runs exercises."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import partial

from relax_core.testing.apart import ExerciseProcess


def test_ending_a_process_kills_it_also_before_it_leads_a_process_group() -> None:
    """A process that was just forked still belongs to the group of its parent."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    ends = (os.open(os.devnull, os.O_RDONLY) for _ in range(3))
    ExerciseProcess(process.pid, *ends, partial(process.wait, 20)).end()
    assert process.returncode == -signal.SIGKILL
