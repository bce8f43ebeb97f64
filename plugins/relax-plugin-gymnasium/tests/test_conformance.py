# SPDX-License-Identifier: Apache-2.0
"""The environment keeps what every environment promises, on each sort of space."""

from __future__ import annotations

from relax_core.api import Task
from relax_core.testing.environment import EnvironmentSuite


def task(name: str, **column: object) -> Task:
    return Task(name, "Play.", metadata={"gymnasium": {"id": name, **column}})


class TestGymnasium(EnvironmentSuite):
    component = "gymnasium"
    options = {"actions": ["left", "down", "right", "up"], "max_steps": 6}
    tasks = (
        Task("lake", "Reach the goal."),
        task("Taxi-v4", seed=4),
        task("Blackjack-v1", kwargs={"natural": True}),
        task("CliffWalking-v1"),
        task("CartPole-v1"),
    )
    turns = ("<action>right</action>", "1", "I say nothing", "0", "<action>Down.</action>", "right", "1")


class TestNumbers(EnvironmentSuite):
    component = "gymnasium"
    options = {
        "id": "Pendulum-v1",
        "invalid": "end",
        "invalid_reward": -1.0,
        "seed_of": "task",
        "template": "{value} {reward}",
    }
    tasks = (Task("one", "Swing."), Task("two", "Swing."))
    turns = ("[0.5]", "<action>[-2]</action>", "[0.1, 0.2]")
