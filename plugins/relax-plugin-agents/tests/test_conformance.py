# SPDX-License-Identifier: Apache-2.0
"""The environment keeps what every environment promises, with a function, a program, and a program in a sandbox."""

from __future__ import annotations

import sys
from pathlib import Path

from relax_core.testing.environment import EnvironmentSuite

HERE = Path(__file__).parent


class TestFunction(EnvironmentSuite):
    component = "agent"
    options = {"function": f"{HERE / 'agents_for_tests.py'}:guesses"}


class TestProgram(EnvironmentSuite):
    component = "agent"
    options = {"command": [sys.executable, str(HERE / "agents_for_tests.py"), "guess"]}


class TestBoxed(EnvironmentSuite):
    component = "agent"
    options = {
        "sandbox": True,
        "command": ["python", "agent.py"],
        "copies": {"agent.py": str(HERE / "boxed_for_tests.py")},
        "judge": ["python", "judge.py"],
        "judge_copies": {"judge.py": str(HERE / "judge_for_tests.py")},
    }
