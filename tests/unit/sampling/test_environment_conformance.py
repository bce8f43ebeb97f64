# SPDX-License-Identifier: Apache-2.0
"""The environments in the box keep what every environment promises."""

from __future__ import annotations

from relax_core.api import Task
from relax_core.testing.environment import EnvironmentSuite


class TestGuessNumber(EnvironmentSuite):
    component = "guess-number"
    tasks = (Task("one", "?", "c"), Task("two", "?", "p"))
    turns = ("h", "d", "nothing", "c")


class TestSingleTurn(EnvironmentSuite):
    component = "single-turn"
