# SPDX-License-Identifier: Apache-2.0
"""Trajectories as plain lists for the way to a reward's process, and back.

The wire format would carry the dataclasses as they are, at several calls of Python an object;
lists are packed in C, and a step sends hundreds of samples.
"""

from __future__ import annotations

from typing import Any

from relax_core.api.outcome import Outcome
from relax_core.api.task import Message
from relax_core.api.trajectory import Node, Trajectory


def flatten(trajectory: Trajectory) -> list[Any]:
    """Plain lists of everything in a trajectory."""
    return [
        [_flat_message(message) for message in trajectory.messages],
        trajectory.response,
        [
            [n.parent, list(n.tokens), n.sampled, list(n.log_probs), list(n.versions), n.turn, list(n.media)]
            for n in trajectory.forest
        ],
        trajectory.outcome.value,
        list(trajectory.step_rewards),
        dict(trajectory.info),
        list(trajectory.step_turns),
        list(trajectory.states),
    ]


def revive(flat: tuple[Any, ...]) -> Trajectory:
    """The trajectory that was flattened; sequences came back from the wire as tuples."""
    messages, response, forest, outcome, step_rewards, info, step_turns, states = flat
    return Trajectory(
        tuple(message if isinstance(message, Message) else Message(*message) for message in messages),
        response,
        tuple(Node(*node) for node in forest),
        Outcome(outcome),
        step_rewards,
        info,
        step_turns=step_turns,
        states=states,
    )


def _flat_message(message: Message) -> Any:
    if isinstance(message.content, str) and not message.tool_calls and not message.name:
        return [message.role, message.content]
    return message
