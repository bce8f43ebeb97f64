# SPDX-License-Identifier: Apache-2.0
"""Conversion of scored samples to rows for the bus, records for people, and metrics of a step.

Only this module turns samples into columns, for all samples of a delivery at once.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np

from relax_core.api.batch import (
    CONTEXTS,
    STATES,
    STEP_REWARDS,
    TEACHER_INDEX,
    TURNS,
    AttemptId,
    Column,
    Ragged,
    RowBatch,
    RowId,
)
from relax_core.api.bus import Sealed
from relax_core.api.family import Routing
from relax_core.api.task import Message, Task
from relax_core.api.trajectory import Outcome, Path, Trajectory, context_key
from relax_core.config.tables import TeacherTable
from relax_core.data.tasks import teachers_of
from relax_core.engines.requests import routed_columns
from relax_core.media.placeholders import media_of
from relax_core.media.source import shown
from relax_core.media.store import key_bytes
from relax_core.rewards.host import ScoredSample
from relax_core.sampling.groups import InflightGroup

TURN_COLUMNS = (TURNS, STATES, CONTEXTS, STEP_REWARDS)
NGRAM = 8
"""Length in tokens of the sequences whose repetition counts. Ordinary text rarely repeats so many tokens; a loop does."""
_FACTORS = np.random.default_rng(NGRAM).integers(1, 2**63, NGRAM, dtype=np.uint64) | np.uint64(1)
"""Odd factors, one for each place in a sequence, whose sum of products identifies the sequence."""
GIVEN = (-1, 0, 0, 0.0)
"""Turn, state, context and reward of given tokens (tokens that the policy did not sample)."""


def turn_columns(
    samples: Sequence[tuple[tuple[Path, ...], Trajectory, ScoredSample]], lengths: np.ndarray
) -> dict[str, Ragged]:
    """Make the columns `TURN_COLUMNS` for the rows of these samples. `lengths` [rows]: number of tokens of each row.

    Each sampled token gets its turn, the state and context in which the turn began, and the reward of the turn.
    """
    turns: list[tuple[int, int, int, float]] = []
    widths: list[int] = []
    for paths, trajectory, scored in samples:
        earned = _earned(trajectory, scored) if paths else {}
        contexts = [context_key(name) for name in trajectory.contexts] or [0] * len(trajectory.states)
        for node in (node for path in paths for node, _ in path):
            widths.append(len(node.tokens))
            known = node.turn in earned
            turn = node.turn
            turns.append((turn, trajectory.states[turn], contexts[turn], earned[turn]) if known else GIVEN)
    columns = zip(*turns, strict=True) if turns else ((), (), (), ())
    return {
        column.name: Ragged(np.repeat(np.array(values, column.dtype), widths), lengths)
        for column, values in zip(TURN_COLUMNS, columns, strict=True)
    }


def _earned(trajectory: Trajectory, scored: ScoredSample) -> dict[int, float]:
    """Return the reward of each trained turn; the rewards sum to the sample's reward.

    A turn without trained tokens passes its reward to the last trained turn before it, else to the first trained turn.
    The last trained turn gets the part of the sample's reward that was not given to any turn.
    """
    turns = sorted({n.turn for n in trajectory.forest if n.sampled and not n.discarded and n.tokens and n.turn >= 0})
    earned = dict.fromkeys(turns, 0.0)
    for turn, reward in enumerate(scored.steps) if turns else ():
        earned[turns[max(0, bisect_right(turns, turn) - 1)]] += reward
    if turns:
        earned[turns[-1]] += scored.value - sum(scored.steps)
    return earned


def row_batch(
    samples: Sequence[tuple[AttemptId, Trajectory, ScoredSample]],
    greedy: int | None = None,
    asked: Collection[str] = (),
    routing: Routing | None = None,
    masks_truncated: bool = False,
) -> tuple[RowBatch, list[Sealed]]:
    """Make the rows of these samples with the columns of the rollout, and a seal for each sample.

    Unjudged samples and the sample with index `greedy` in each group have no rows. With `masks_truncated`, the rows of
    truncated samples are for the statistics of advantages alone, and their seals have no trained tokens. Turn and media
    columns are made only if `asked` names them, routed experts only with a `routing`.
    """
    ids: list[RowId] = []
    rewards: list[float] = []
    owned: list[tuple[Path, ...]] = []
    for attempt, trajectory, scored in samples:
        own = trajectory.paths() if scored.outcome.judged and attempt.sample != greedy else ()
        ids += [RowId(*attempt, number) for number in range(len(own))]
        rewards += [scored.value] * len(own)
        owned.append(own)
    columns = _columns([*chain.from_iterable(owned)], rewards)
    if any(column.name in asked for column in TURN_COLUMNS):
        scored_paths = [
            (paths, trajectory, judged) for paths, (_, trajectory, judged) in zip(owned, samples, strict=True)
        ]
        made = turn_columns(scored_paths, columns["tokens"].lengths)
        columns |= {name: column for name, column in made.items() if name in asked}
    counts = _trained(columns, [len(own) for own in owned])
    sealed: list[Sealed] = []
    for (attempt, trajectory, scored), own, (trained, oldest) in zip(samples, owned, counts, strict=True):
        masked = masks_truncated and scored.outcome is Outcome.TRUNCATED
        whole = scored.value - sum(scored.steps) if scored.outcome.judged else 0.0
        floor, num_trained, newest = (oldest, trained, trajectory.newest) if trained and not masked else (0, 0, {})
        sealed.append(
            Sealed(
                attempt, len(own), scored.outcome, scored.value, floor, num_trained, scored.parts, newest,
                attempt.sample == greedy, whole, masked,
            )
        )  # fmt: skip
    if "media" in asked:
        keys = [[key for node, _ in path for key in node.media] for path in chain.from_iterable(owned)]
        columns["media"] = Ragged.of([key_bytes(own) for own in keys], like=key_bytes(()))
    if routing is not None:
        columns |= routed_columns([*chain.from_iterable(owned)], routing, columns["tokens"].lengths)
    return RowBatch(tuple(ids), columns), sealed


def with_row_column(rows: RowBatch, column: Column, values: Sequence[float]) -> RowBatch:
    """Add a column of one value per row."""
    added = Ragged(np.array(values, column.dtype), np.ones(len(rows), np.int64))
    return rows.with_columns({column.name: added})


def with_teacher(rows: RowBatch, tasks: Mapping[int, Task], teachers: Sequence[TeacherTable]) -> RowBatch:
    """Add the column `teacher_index`: index of the first teacher that matches the row's task. `tasks`: by group."""
    of_group = {group: teachers_of(task, teachers)[0] for group, task in tasks.items()}
    return with_row_column(rows, TEACHER_INDEX, [of_group[row.group] for row in rows.ids])


def _columns(paths: Sequence[Path], rewards: Sequence[float]) -> dict[str, Ragged]:
    nodes = [node for path in paths for node, _ in path]
    widths = np.array([len(node.tokens) for node in nodes], np.int64)
    ends = np.cumsum([len(path) for path in paths], dtype=np.int64)
    before = np.concatenate(([0], np.cumsum(widths)))
    lengths = np.diff(before[ends], prepend=0)
    total = int(before[-1])
    loss_mask = np.repeat(np.array([trained for path in paths for _, trained in path], np.uint8), widths)
    drawn = [node for node in nodes if node.sampled]
    sampled = np.repeat(np.array([node.sampled for node in nodes], bool), widths)
    num_sampled = int(sampled.sum())

    def column(values: Sequence[Sequence[Any]], given: float, dtype: Any) -> Ragged:
        """Place the values of sampled nodes at their tokens; the remaining tokens get `given`."""
        whole = np.full(total, given, dtype)
        whole[sampled] = np.fromiter(chain.from_iterable(values), dtype, num_sampled)
        return Ragged(whole, lengths)

    return {
        "tokens": Ragged(np.fromiter(chain.from_iterable([node.tokens for node in nodes]), np.int32, total), lengths),
        "loss_mask": Ragged(loss_mask, lengths),
        "rollout_log_probs": column([node.log_probs for node in drawn], 0.0, np.float32),
        "weight_versions": column([node.versions for node in drawn], -1, np.int32),
        "rewards": Ragged(np.array(rewards, np.float32), np.ones(len(paths), np.int64)),
    }


def _trained(columns: dict[str, Ragged], num_rows: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield (number of trained tokens, oldest step of the weights that sampled them), or (0, 0), for each sample."""
    mask = columns["loss_mask"]
    before = np.concatenate(([0], np.cumsum(mask.values, dtype=np.int64)))[mask.offsets()]
    sizes = np.array(num_rows, np.int64)
    ends = np.cumsum(sizes)
    counts = before[ends] - before[ends - sizes]
    some = counts > 0
    starts = (np.cumsum(counts) - counts)[some]
    versions = columns["weight_versions"].values[mask.values.astype(bool)]
    oldest = iter(np.minimum.reduceat(versions, starts).tolist() if len(starts) else ())
    return ((count, next(oldest)) if count else (0, 0) for count in counts.tolist())


# -- records and metrics for people ------------------------------------------------------------------------------------


def sample_record(task: Task, trajectory: Trajectory, scored: ScoredSample) -> dict[str, object]:
    """Describe one sample as JSON data: its prompt, response and reward, with the keys of its media."""
    prompt = () if isinstance(task.prompt, str) else task.prompt
    keys: Sequence[str] = [key for node in trajectory.forest for key in node.media]
    if keys and len(keys) != len(
        media_of(trajectory.messages)
    ):  # branches repeat media: show only the keys of the prompt
        first = trajectory.forest[0].media if trajectory.forest else ()
        keys = first if len(first) == len(media_of(prompt)) else ()
    record: dict[str, Any] = {
        "task_id": task.id,
        "prompt": task.prompt if isinstance(task.prompt, str) else _messages(prompt, keys),
        "response": trajectory.response,
        "answer": task.answer,
        "reward": scored.value if scored.outcome.judged else None,
        "outcome": scored.outcome.value,
        "num_tokens": trajectory.num_sampled,
    }
    if scored.parts:
        record["rewards"] = dict(scored.parts)
    if scored.error:
        record["error"] = scored.error
    shared = bool(prompt) and trajectory.messages[: len(prompt)] == prompt
    if not shared:
        asked = [("user", task.prompt)] if isinstance(task.prompt, str) else [(one.role, one.text) for one in prompt]
        shared = [(one.role, one.text) for one in trajectory.messages[: len(asked)]] == asked
    if len(trajectory.messages) > 2 or not shared:
        record["messages"] = _messages(trajectory.messages, keys)
    return record


def records(groups: Sequence[InflightGroup]) -> tuple[dict[str, Any], ...]:
    """Describe every sample of scored groups as JSON data, with its attempt and the filter that rejected it."""
    return tuple(
        {"group_id": attempt.group, "sample_index": attempt.sample, "attempt": attempt.attempt,
         **sample_record(one.task, trajectory, scored),
         **({"filtered": f"{one.rejected_by}: {one.reason}"} if one.rejected_by else {})}
        for one in groups
        for attempt, trajectory, scored in one.samples
    )  # fmt: skip


def measures(groups: Sequence[InflightGroup]) -> dict[str, float]:
    """Return the metrics of scored groups that only the rollout can compute."""
    trajectories = [trajectory for one in groups for trajectory in one.trajectories]
    filtered = Counter[str]()
    for one in groups:
        if one.rejected_by:
            filtered[f"samples/filtered/{one.rejected_by}"] += len(one.scores)
    discarded = Counter[str]()
    sampled = [node for trajectory in trajectories for node in trajectory.forest if node.sampled]
    for node in sampled:
        if node.discarded:
            discarded[f"tokens/discarded/{node.discarded}"] += len(node.tokens)
    spent: dict[str, list[float]] = {"reward": [one.reward_s for one in groups for _ in one.trajectories]}
    for part in ("queue", "generate", "environment"):
        spent[part] = [trajectory.times.get(part, 0.0) for trajectory in trajectories]
    return {
        **filtered,
        **discarded,
        "samples/scored": float(len(trajectories)),
        "tokens/generated": float(sum([len(node.tokens) for node in sampled])),
        "time/rollout_s": sum(one.seconds for one in groups) / max(1, len(groups)),
        **{
            f"time/sample/{part}_{name}": value
            for part, values in spent.items()
            if values
            for name, value in (("s", sum(values) / len(values)), ("max_s", max(values)))
        },
    }


def completion_values(trajectories: Sequence[Trajectory]) -> dict[str, tuple[float, ...]]:
    """Return the values of each sample that `completion_metrics` summarizes. A completion is all that a sample sampled."""
    lengths: list[int] = []
    repeated: list[float] = []
    for trajectory in trajectories:
        length = found = total = 0
        for node in trajectory.forest:
            if node.sampled:
                count = len(node.tokens)
                length += count
                if count >= NGRAM:
                    found += repeated_ngrams(node.tokens)
                    total += count - NGRAM + 1
        lengths.append(length)
        if total:
            repeated.append(found / total)
    outcomes = [trajectory.outcome for trajectory in trajectories]
    return {
        "length": tuple(lengths),
        "finished": tuple([length for length, how in zip(lengths, outcomes, strict=True) if how is Outcome.FINISHED]),
        "truncated": tuple([float(how is Outcome.TRUNCATED) for how in outcomes]),
        "repeated": tuple(repeated),
    }


def repeated_ngrams(tokens: Sequence[int]) -> int:
    """Count the sequences of `NGRAM` tokens that occurred before, at an earlier place in `tokens`."""
    count = len(tokens) - NGRAM + 1
    if count < 2:
        return 0
    ids = np.asarray(tokens).astype(np.uint64)
    keys = np.zeros(count, np.uint64)
    for place, factor in enumerate(_FACTORS):
        keys += ids[place : place + count] * factor  # modulo 2^64
    return count - len(np.unique(keys))


def _messages(messages: Sequence[Message], keys: Sequence[str]) -> list[dict[str, object]]:
    """Describe messages as JSON data, with the store keys of their media; inline media bytes are left out."""
    left = iter(keys)
    described: list[dict[str, Any]] = []
    for message in messages:
        content: list[dict[str, Any]] = []
        parts = () if isinstance(message.content, str) or not media_of((message,)) else message.content
        for part in parts:
            if part.media is None:
                content.append({"type": "text", "text": part.text})
                continue
            content.append({"type": part.media.kind, "source": shown(part.media.source)})
            if part.media.view is not None:
                content[-1]["view"] = list(part.media.view)
            if key := next(left, ""):
                content[-1]["key"] = key
        calls = [{"name": call.name, "arguments": call.arguments} for call in message.tool_calls]
        described.append({
            "role": message.role, "content": content or message.text,
            **({"name": message.name} if message.name else {}), **({"tool_calls": calls} if calls else {}),
        })  # fmt: skip
    return described
