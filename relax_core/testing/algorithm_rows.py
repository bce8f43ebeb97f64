# SPDX-License-Identifier: Apache-2.0
"""Random rows for an algorithm under test: whole groups, different lengths, and all columns of the algorithm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from relax_core.api.algorithm import Source
from relax_core.api.batch import (
    CONTEXTS,
    STANDARD,
    STATES,
    STEP_REWARDS,
    TURNS,
    AttemptId,
    Column,
    Ragged,
    RowBatch,
    RowId,
)
from relax_core.api.bus import Sealed
from relax_core.api.trajectory import Outcome

PROMPT = 2
"""Number of given tokens at the start of each row."""
_VOCAB = 32
FAILED = list(Outcome).index(Outcome.REWARD_ERROR)
_ALWAYS = ("rollout_log_probs", "old_log_probs", "ref_log_probs", "rewards", "weight_versions")


def random_rows(algorithm: Any, groups: int, group_size: int, seed: int = 0) -> RowBatch:
    """Draw one row per sample. `advantages` are constant over a row; the first row has an observation in its middle."""
    random = np.random.default_rng(seed)
    if algorithm.source is Source.PAIRS:
        group_size = 2
    ids = tuple(RowId(group, sample, 0, 0) for group in range(groups) for sample in range(group_size))
    lengths = random.integers(PROMPT + 2, PROMPT + 7, len(ids))
    masks = [np.r_[np.zeros(PROMPT), np.ones(length - PROMPT)].astype(np.uint8) for length in lengths]
    masks[0][PROMPT + 1] = 0
    columns = {c.name: _column(c, lengths, random) for c in _wanted(algorithm)}
    columns["tokens"] = Ragged.of([random.integers(0, _VOCAB, n).astype(np.int32) for n in lengths])
    columns["loss_mask"] = Ragged.of(masks)
    columns["outcome"] = _per_row(np.full(len(ids), list(Outcome).index(Outcome.FINISHED), np.uint8))
    columns["advantages"] = Ragged(np.repeat(random.normal(size=len(ids)), lengths), lengths)
    rows = RowBatch(ids, columns)
    return rows if TURNS.name not in columns else with_turns(rows)


def with_turns(rows: RowBatch) -> RowBatch:
    """Add turn columns to rows: each run of trained tokens is a turn.

    All turns begin in the same state and context; the last turn of a row earns its reward.
    """
    mask, rewards = rows.columns["loss_mask"], rows.columns["rewards"].values
    turns = [np.cumsum(np.diff(row, prepend=0) == 1) * row - 1 for row in (own.astype(np.int32) for own in mask.rows())]
    earned = [np.where(row == row.max(), reward, 0.0) for row, reward in zip(turns, rewards, strict=True)]
    states = np.where(np.concatenate(turns) < 0, 0, 7)
    return rows.with_columns(
        {
            TURNS.name: Ragged.of([row.astype(np.int32) for row in turns]),
            STATES.name: Ragged(states.astype(np.int64), mask.lengths),
            CONTEXTS.name: Ragged(states.astype(np.int64), mask.lengths),
            STEP_REWARDS.name: Ragged.of(earned),
        }
    )


def padded(rows: RowBatch, width: int) -> RowBatch:
    """Append `width` tokens with loss_mask 0 and arbitrary values to each row."""
    random = np.random.default_rng(9)
    lengths = rows.columns["tokens"].lengths
    columns = dict(rows.columns)
    for name, column in rows.columns.items():
        if np.array_equal(column.lengths, lengths):
            columns[name] = Ragged.of(
                [np.concatenate([row, _filler(name, row, width, random)]) for row in column.rows()]
            )
    return RowBatch(rows.ids, columns)


def sealed(rows: RowBatch) -> dict[AttemptId, Sealed]:
    """Return the samples of these rows as the bus seals them, with their rewards and outcomes."""
    trained = [int(mask.sum()) for mask in rows.columns["loss_mask"].rows()]
    judged = zip(rows.columns["rewards"].values, rows.columns["outcome"].values, trained, strict=True)
    return {
        row.attempt_id: Sealed(row.attempt_id, 1, list(Outcome)[int(code)], float(reward), trained_tokens=tokens)
        for row, (reward, code, tokens) in zip(rows.ids, judged, strict=True)
    }


def greedy(rows: RowBatch) -> dict[AttemptId, Sealed]:
    """Return one greedy baseline sample per group. These samples have no rows."""
    last = {row.group: row for row in rows.ids}
    attempts = [AttemptId(group, row.sample + 1, row.attempt) for group, row in last.items()]
    return {attempt: Sealed(attempt, 0, Outcome.FINISHED, 0.5, baseline=True) for attempt in attempts}


def _filler(name: str, row: np.ndarray, width: int, random: np.random.Generator) -> np.ndarray:
    shape = (width, *row.shape[1:])
    values = np.zeros(shape) if name == "loss_mask" else random.integers(1, 5, shape)
    return values.astype(row.dtype)


def _wanted(algorithm: Any) -> Sequence[Column]:
    fitted = (algorithm.fit_columns(fit) for fit in algorithm.fits)
    asked = (
        algorithm.columns() | algorithm.advantage_columns() | algorithm.prepared() | frozenset[Column]().union(*fitted)
    )
    named = {column.name: column for column in sorted(asked, key=lambda column: column.name)}
    return list({**{name: STANDARD[name] for name in _ALWAYS}, **named}.values())


def _column(column: Column, lengths: np.ndarray, random: np.random.Generator) -> Ragged:
    if column.per == "row":
        return _per_row(_values(column, (len(lengths), *column.shape), random))
    return Ragged(_values(column, (int(lengths.sum()), *column.shape), random), np.asarray(lengths))


def _values(column: Column, shape: tuple[int, ...], random: np.random.Generator) -> np.ndarray:
    """Draw column values: log-probs below 0, rewards above 0, small ids and versions; float64 for finite differences."""
    if not column.dtype.startswith(("float", "bfloat")):
        return random.integers(0, 2, shape).astype("int64" if column.dtype == "object" else column.dtype)
    values = random.normal(size=shape)
    if column.name == "rewards":  # some algorithms refuse negative rewards
        return np.abs(values)
    return -np.abs(values) - 0.1 if "log_probs" in column.name else values


def _per_row(values: np.ndarray) -> Ragged:
    return Ragged(values, np.ones(len(values), np.int64))
