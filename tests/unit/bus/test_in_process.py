# SPDX-License-Identifier: Apache-2.0
"""The in-process bus keeps the promises of every bus."""

from __future__ import annotations

from relax_core.testing.bus import BusSuite


class TestInProcess(BusSuite):
    component = "in-process"
