# SPDX-License-Identifier: Apache-2.0
"""The stand-ins are needed: this fails when SGLang can be imported on a CPU without them, and they can go."""

from __future__ import annotations

import subprocess
import sys

import pytest
from relax_plugin_sglang.environment_variables import ALWAYS, ON_CPU


@pytest.mark.faults  # slow, and its result changes with the lock only
def test_sglang_cannot_be_imported_without_them() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", "from sglang.srt.managers.scheduler import Scheduler"],
        env={**ALWAYS, **ON_CPU}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert ran.returncode != 0
    assert "torchvision::nms" in ran.stderr or "sgl_kernel" in ran.stderr
