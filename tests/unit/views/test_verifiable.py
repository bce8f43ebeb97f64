# SPDX-License-Identifier: Apache-2.0
"""`relax try` says whether rewards pay for the answers that the task file gives."""

from __future__ import annotations

from typing import Any

from relax_core.cli.plan import _verifiable


def _record(group: int, reward: float | None, answer_reward: float | None) -> dict[str, Any]:
    return {"group_id": group, "task_id": f"task-{group}", "reward": reward, "answer_reward": answer_reward}


def test_tasks_whose_answer_earns_less_than_a_sample_are_named() -> None:
    records = [_record(0, 0.0, 1.0), _record(0, 1.0, 1.0), _record(1, 1.0, 0.0), _record(1, None, 0.0)]
    assert list(_verifiable(records)) == [
        "the answer of the task file earns as much as the best sample in 1 of 2 tasks",
        "less in task-1: check that the answer is right and that the reward accepts it as written",
    ]


def test_tasks_without_an_answer_that_can_be_judged_are_left_out() -> None:
    assert list(_verifiable([_record(0, 1.0, None)])) == []
    assert list(_verifiable([_record(0, None, -0.5), _record(0, -1.0, -0.5)])) == [
        "the answer of the task file earns as much as the best sample in 1 of 1 tasks"
    ]
