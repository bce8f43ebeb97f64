# SPDX-License-Identifier: Apache-2.0
"""Sandboxes keep what every sandbox promises."""

from __future__ import annotations

from relax_core.testing.sandbox import SandboxSuite


class TestBubblewrap(SandboxSuite):
    component = "bubblewrap"


class TestLandlock(SandboxSuite):
    component = "landlock"


class TestProcess(SandboxSuite):
    component = "process"
