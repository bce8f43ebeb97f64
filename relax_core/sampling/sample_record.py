# SPDX-License-Identifier: Apache-2.0
"""Samples as people read them: one plain record each, and the means that a step's metrics are made of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from relax_core.api.task import Media, Message, Task
from relax_core.api.trajectory import Trajectory
from relax_core.data.media_pipeline import media_of
from relax_core.media.source import shown
from relax_core.rewards.scorer import ScoredSample
from relax_core.sampling.inflight import JudgedGroup


def sample_record(task: Task, trajectory: Trajectory, judgement: ScoredSample) -> dict[str, Any]:
    """One sample as JSON: what was asked, said and judged."""
    keys = _keys(task, trajectory)
    record: dict[str, Any] = {
        "task_id": task.id,
        "prompt": task.prompt if isinstance(task.prompt, str) else _messages(task.prompt, keys),
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
        record["messages"] = _messages(trajectory.messages, keys)
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


def _keys(task: Task, trajectory: Trajectory) -> Sequence[str]:
    """Of the media that its messages show, in order; those of the prompt alone where branches part what was shown."""
    told = [key for node in trajectory.forest for key in node.media]
    if len(told) == len(media_of(trajectory.messages)):
        return told
    first = trajectory.forest[0].media if trajectory.forest else ()
    prompt = () if isinstance(task.prompt, str) else task.prompt
    return first if len(first) == len(media_of(prompt)) else ()


def _messages(messages: Sequence[Message], keys: Sequence[str]) -> list[dict[str, Any]]:
    left = iter(keys)
    return [{"role": message.role, "content": _content(message, left)} for message in messages]


def _content(message: Message, keys: Iterator[str]) -> str | list[dict[str, Any]]:
    if isinstance(message.content, str) or all(part.media is None for part in message.content):
        return message.text
    return [{"type": "text", "text": part.text} if part.media is None else _medium(part.media, next(keys, ""))
            for part in message.content]  # fmt: skip


def _medium(media: Media, key: str) -> dict[str, Any]:
    """Its key leads to the store and to the copy for people; a source that holds the bytes itself is not repeated."""
    told: dict[str, Any] = {"type": media.kind, "source": shown(media.source)}
    if media.view is not None:
        told["view"] = list(media.view)
    return {**told, "key": key} if key else told
