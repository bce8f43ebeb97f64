# SPDX-License-Identifier: Apache-2.0
"""The source and the reward keep what their kinds promise."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import reasoning_gym  # noqa: F401 (the suites' processes are forked with the slow modules that this process has)

from relax_core.api import Task
from relax_core.testing.reward import RewardSuite
from relax_core.testing.task_source import ROWS, TaskSourceSuite

pytestmark = pytest.mark.one_process("exercises")
SUM = Task(
    "sum",
    "What is 26 + 130?",
    "156",
    {
        "set": "chain_sum",
        "recipe": {"set": "chain_sum", "seed": 7, "size": 2, "index": 0, "level": None, "options": {}},
    },
)


class TestReasoningGymSource(TaskSourceSuite):
    component = "reasoning-gym"
    slow_modules = ("numpy", "sympy", "reasoning_gym")

    @classmethod
    def store(cls, rows: tuple[Mapping[str, Any], ...], directory: Path) -> str:
        """Write a file of as many tasks: the rows themselves can't be stored, as tasks are made."""
        path = directory / "tasks.gym"
        path.write_text(f'size = {len(rows)}\n[[sets]]\nname = "chain_sum"\n[[sets]]\nname = "gcd"\nlevel = 1\n')
        return str(path)

    def test_answer_and_other_columns_arrive(self, opened: Any) -> None:
        tasks = [opened[index] for index in range(len(ROWS))]
        assert all(isinstance(task.answer, str) for task in tasks)
        assert {task.column("set") for task in tasks} == {"chain_sum", "gcd"}
        assert {task.column("level") for task in tasks} == {None, 1}


class TestReasoningGymReward(RewardSuite):
    component = "reasoning-gym"
    slow_modules = ("numpy", "sympy", "reasoning_gym")
    samples = ((SUM, "156"), (SUM, "It is <answer>156</answer>"), (SUM, "<answer>156 or 7</answer>"))
    best = 1
