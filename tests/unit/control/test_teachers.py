# SPDX-License-Identifier: Apache-2.0
"""Teachers in a plan: who is needed, where they live, and what is refused before anything starts."""

from __future__ import annotations

from typing import Any

import pytest

from relax_core.api.errors import ConfigError
from relax_core.api.plan import Plan
from relax_core.registry.catalogue import Catalogue
from tests.unit.control import conftest


def planned(catalogue: Catalogue, *overrides: str, on_gpus: bool = False, **layer: Any) -> Plan:
    taught = {"algorithm": "distillation", "placement": "hybrid", "rewards": [], **layer}
    return conftest.planned(catalogue, *overrides, on_gpus=on_gpus, **taught)


STUDENT = ("algorithm.mode=loss", "algorithm.tokens=student-top-k")
TWO = [{"path": "a", "only": "domain=maths"}, {"path": "b", "only": "domain=code"}]


def names(plan: Plan) -> set[str]:
    return {operation.name for operation in plan.operations}


def test_the_algorithm_decides_what_a_teacher_is_asked(catalogue: Catalogue) -> None:
    sampled = planned(catalogue, teachers="a")
    assert names(sampled) == {"rollout.generate", "teacher.log_probs", "advantages.compute", "actor.fit"}
    assert "teacher_log_probs" in sampled.advantage_columns
    student = planned(catalogue, *STUDENT, teachers="a")
    assert names(student) >= {"actor_fwd.top_k", "teacher.log_probs_at"} and "teacher.log_probs" not in names(student)
    teacher = planned(catalogue, "algorithm.mode=loss", "algorithm.tokens=teacher-top-k", teachers="a")
    assert "teacher.top_k" in names(teacher) and "actor-fwd" not in teacher.roles


def test_teachers_are_not_loaded_if_the_algorithm_does_not_use_them(catalogue: Catalogue) -> None:
    plan = planned(catalogue, algorithm="grpo", rewards=["exact"], teachers="a")
    assert "teacher" not in plan.roles and "teacher" not in plan.groups


def test_no_rewards_are_needed_unless_they_are_learnt_from(catalogue: Catalogue) -> None:
    planned(catalogue, teachers="a", rewards=[])
    with pytest.raises(ConfigError, match="rewards: got nothing; distillation, as configured, learns from rewards"):
        planned(catalogue, "algorithm.reward_coef=0.5", teachers="a", rewards=[])
    planned(catalogue, "algorithm.reward_coef=0.5", teachers="a", rewards=["exact"])


@pytest.mark.parametrize(("placement", "own"), [("colocate", False), ("hybrid", False), ("async", True)])
def test_teachers_run_on_the_configured_devices(catalogue: Catalogue, placement: str, own: bool) -> None:
    groups = planned(catalogue, teachers="a", placement=placement, on_gpus=True).groups
    assert (not groups["teacher"].devices & groups["actor"].devices) is own
    assert groups["teacher"].offloads == ("weights",)


def test_several_have_operations_of_their_own_on_the_same_devices(catalogue: Catalogue) -> None:
    plan = planned(catalogue, *STUDENT, teachers=TWO, placement="async", on_gpus=True)
    own = {operation.name: operation for operation in plan.operations if operation.role == "teacher"}
    assert {name: operation.row_filter for name, operation in own.items()} == {
        "teacher-0.log_probs_at": "domain=maths", "teacher-1.log_probs_at": "domain=code",
    }  # fmt: skip
    assert all("teacher_index" in operation.consumes for operation in own.values())
    assert "teacher" not in plan.groups and plan.groups["teacher-0"].devices == plan.groups["teacher-1"].devices
    assert plan.neighbours("teacher-0") == ("teacher-1",)


@pytest.mark.parametrize(("teachers", "says"), [
    ([], 'teachers: got nothing, with algorithm distillation; the algorithm needs a teacher: write teachers = "FOLDER"'),
    ([{"path": "a"}, {"path": "b"}], r"teachers\.1\.only: got nothing, as teachers\.0 has"),
    ([{"path": "a", "only": "d=x"}, {"path": "b", "only": "d = x"}], r"teachers\.1\.only: got d = x, as teachers\.0 has"),
    ([{"path": "a", "only": "d=x"}, {"path": "b"}], r"teachers\.1\.only: got nothing, which matches every task"),
])  # fmt: skip
def test_missing_or_overlapping_teachers_are_refused(catalogue: Catalogue, teachers: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        planned(catalogue, teachers=teachers)
