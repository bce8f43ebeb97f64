# SPDX-License-Identifier: Apache-2.0
"""All rewards keep what every reward promises."""

from __future__ import annotations

from relax_core.api import Task
from relax_core.testing.reward import RewardSuite

HALF = Task("half", "What is 1/2 of 1?", "1/2")


class TestExact(RewardSuite):
    component = "exact"
    samples = ((HALF, "0.5"), (HALF, "1/2"), (HALF, "1/2 "))
    best = 1


class TestMaths(RewardSuite):
    component = "maths"
    samples = ((HALF, "two"), (HALF, r"so it is \boxed{\frac{1}{2}}"), (HALF, "2"))
    best = 1


class TestJudge(RewardSuite):
    component = "judge"
    samples = ((HALF, "two"), (HALF, "a good one"))
    best = 1

    @classmethod
    def engine_says(cls, prompt: str) -> str:
        return "It is right.\n9" if "a good one" in prompt else "No.\n2"
