# SPDX-License-Identifier: Apache-2.0
"""Promises of `bubblewrap` beyond those of every sandbox. The program in the box only opens; it never writes."""

from __future__ import annotations

import pytest
from relax_plugin_sandboxes import bubblewrap
from relax_plugin_sandboxes.bubblewrap import PROBE, Bubblewrap

from relax_core.api import InfrastructureError, SandboxLimits

OPENS = """
import os
for path in ("/dev/null", "/dev/zero", "/dev/full", "/dev/shm/own", "own", "/tmp/own"):
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT))
for path in ("/proc/1/oom_score_adj", "/proc/pressure/cpu", "/proc/sysrq-trigger"):
    try:
        os.close(os.open(path, os.O_WRONLY))
        print(path)
    except OSError:
        pass
"""


async def test_a_program_opens_no_kernel_setting_and_changes_no_device_but_uses_devices() -> None:
    """Before its /proc and its devices were read-only, a program of root opened 766 files for writing."""
    box = await Bubblewrap().open(SandboxLimits(wall_s=30.0))
    try:
        result = await box.run([box.python, "-I", "-S", "-c", PROBE + OPENS], b"", {}, 0.0, False)
    finally:
        await box.close()
    assert (result.stdout, result.stderr) == (b"42\n", b"")


async def test_the_probe_refuses_a_box_that_can_change_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bubblewrap, "PROBE", "print('42 /proc/sys/kernel/core_pattern /dev/null')")
    with pytest.raises(InfrastructureError, match="can change 2 settings or devices .*/core_pattern; update bwrap"):
        await Bubblewrap().probe()
