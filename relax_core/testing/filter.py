# SPDX-License-Identifier: Apache-2.0
"""The conformance suite of filters: a filter returns a reason or an empty string, the same for a group on each call."""

from __future__ import annotations

from collections.abc import Sequence
from math import nan
from typing import Any, ClassVar

from relax_core.api.batch import AttemptId
from relax_core.api.task import Task
from relax_core.testing.samples import trajectory
from relax_core.testing.suite import Suite


class FilterSuite(Suite):
    """The suite of a filter; a subclass sets `component`."""

    kind = "filter"
    task: ClassVar[Task] = Task("sum", "What is 2 + 2?", "4")
    responses: ClassVar[Sequence[str]] = ("4", "5", "The answer is four.", "")
    rewards: ClassVar[Sequence[Sequence[float]]] = (
        (1.0, 0.0, 0.5, 0.0), (0.0,) * 4, (1.0,) * 4, (nan, 1.0, 0.0, nan), (nan,) * 4,
    )  # fmt: skip
    """Rewards of each group, one per response; NaN marks a sample without a verdict."""

    @classmethod
    def exercise(cls, component: Any) -> Any:
        return [cls.reason(component, rewards) for rewards in cls.rewards]

    @classmethod
    def reason(cls, component: Any, rewards: Sequence[float]) -> Any:
        """Return the filter's answer for a group with these rewards."""
        attempts = [AttemptId(0, sample, 0) for sample in range(len(rewards))]
        trajectories = [trajectory(cls.task, response) for response in cls.responses[: len(rewards)]]
        return component.reject(cls.task, attempts, trajectories, list(rewards))

    def test_a_reason_is_text(self, made: Any) -> None:
        for rewards in self.rewards:
            assert isinstance(self.reason(made, rewards), str), (
                "reject() must return a string: the reason, or an empty string to keep the group"
            )

    def test_a_group_of_one_is_judged(self, made: Any) -> None:
        assert isinstance(self.reason(made, [1.0]), str)
