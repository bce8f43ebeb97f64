# SPDX-License-Identifier: Apache-2.0
"""Trajectories for tests: a prompt and a sampled response, with one token per byte."""

from __future__ import annotations

from relax_core.api.task import Message, Task
from relax_core.api.trajectory import Node, Outcome, Trajectory


def trajectory(task: Task, response: str, outcome: Outcome = Outcome.FINISHED) -> Trajectory:
    """Return an attempt in which the policy answered `response` in its first turn."""
    prompt = (Message("user", task.prompt),) if isinstance(task.prompt, str) else tuple(task.prompt)
    given = tuple("".join(message.text for message in prompt).encode()) or (0,)
    own = tuple(response.encode()) or (0,)
    sampled = Node(0, own, sampled=True, log_probs=(-0.5,) * len(own), versions=(0,) * len(own))
    forest = (Node(None, given, sampled=False), sampled)
    return Trajectory((*prompt, Message("assistant", response)), response, forest, outcome)
