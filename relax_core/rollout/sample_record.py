# SPDX-License-Identifier: Apache-2.0
"""Samples as people read them: one plain record each, and the means that a step's metrics are made of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from relax_core.api.task import Message, Task
from relax_core.api.trajectory import Trajectory
from relax_core.rollout.finished import JudgedGroup
from relax_core.rollout.judge import Judgement


def sample_record(task: Task, trajectory: Trajectory, judgement: Judgement) -> dict[str, Any]:
    """One sample as JSON: what was asked, said and judged."""
    record: dict[str, Any] = {
        "task_id": task.id,
        "prompt": task.prompt if isinstance(task.prompt, str) else [_message(m) for m in task.prompt],
        "response": trajectory.response,
        "answer": task.answer,
        "reward": judgement.value if judgement.outcome.judged else None,
        "outcome": judgement.outcome.value,
        "num_tokens": trajectory.num_sampled,
    }
    if judgement.parts:
        record["rewards"] = dict(judgement.parts)
    if judgement.error:
        record["error"] = judgement.error
    if len(trajectory.messages) > 2:
        record["messages"] = [_message(message) for message in trajectory.messages]
    return record


def records(judged: Sequence[JudgedGroup]) -> tuple[dict[str, Any], ...]:
    """Every sample of finished groups, with its place in the ledger."""
    return tuple(
        {"group_id": attempt.group, "sample_index": attempt.sample, "attempt": attempt.attempt,
         **sample_record(one.group.task, trajectory, judgement), **_rejection(one)}
        for one in judged
        for attempt, trajectory, judgement in one.samples
    )  # fmt: skip


def _rejection(judged: JudgedGroup) -> dict[str, str]:
    return {"filtered": f"{judged.rejected_by}: {judged.reason}"} if judged.rejected_by else {}


def measures(judged: Sequence[JudgedGroup]) -> dict[str, float]:
    """What rollout knows of these groups and the actor does not."""
    trajectories = [trajectory for one in judged for trajectory in one.group.trajectories]
    truncated = sum(trajectory.outcome == "truncated" for trajectory in trajectories)
    filtered = Counter[str]()
    for one in judged:
        if one.rejected_by:
            filtered[f"samples/filtered/{one.rejected_by}"] += len(one.judgements)
    return {
        **filtered,
        "samples/scored": float(len(trajectories)),
        "tokens/generated": float(sum(trajectory.num_sampled for trajectory in trajectories)),
        "length/truncated": truncated / max(1, len(trajectories)),
        "time/rollout_s": sum(one.group.seconds for one in judged) / max(1, len(judged)),
    }


def _message(message: Message) -> dict[str, Any]:
    return {"role": message.role, "content": message.text}
