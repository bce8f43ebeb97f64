# SPDX-License-Identifier: Apache-2.0
"""From trajectories to rows of the bus: the only place where samples become columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, compress
from typing import Any

from relax_core.api.batch import AttemptId, Ragged, RowBatch, RowId
from relax_core.api.bus import Sealed
from relax_core.api.trajectory import Row, Trajectory
from relax_core.rollout.judge import Judgement


def row_batch(
    samples: Sequence[tuple[AttemptId, Trajectory, Judgement]], greedy: int | None = None
) -> tuple[RowBatch, list[Sealed]]:
    """Rows with the columns that rollout produces, and a seal for each sample; samples without a verdict have no rows, nor
    has the one whose place is `greedy`."""
    ids: list[RowId] = []
    rows: list[Row] = []
    rewards: list[float] = []
    sealed: list[Sealed] = []
    for attempt, trajectory, judgement in samples:
        own = trajectory.rows() if judgement.outcome.judged and attempt.sample != greedy else ()
        ids += [RowId(*attempt, number) for number in range(len(own))]
        rows += own
        rewards += [judgement.value] * len(own)
        sealed.append(_seal(attempt, own, judgement, trajectory.newest, attempt.sample == greedy))
    return RowBatch(tuple(ids), _columns(rows, rewards)), sealed


def _seal(attempt: AttemptId, rows: Sequence[Row], judgement: Judgement, newest: int | None, greedy: bool) -> Sealed:
    trained = [*chain.from_iterable(compress(row.versions, row.loss_mask) for row in rows)]
    return Sealed(
        attempt, len(rows), judgement.outcome, judgement.value, min(trained, default=0), len(trained), judgement.parts,
        max(trained, default=None) if newest is None or not trained else newest, greedy,
    )  # fmt: skip


def _columns(rows: Sequence[Row], rewards: Sequence[float]) -> dict[str, Ragged]:
    import numpy as np

    lengths = np.array([len(row.tokens) for row in rows], np.int64)

    def ragged(values: Iterable[Sequence[Any]], dtype: Any) -> Ragged:
        return Ragged(np.fromiter(chain.from_iterable(values), dtype, int(lengths.sum())), lengths)

    return {
        "tokens": ragged((row.tokens for row in rows), np.int32),
        "loss_mask": ragged((row.loss_mask for row in rows), np.uint8),
        "rollout_log_probs": ragged((row.log_probs for row in rows), np.float32),
        "weight_versions": ragged((row.versions for row in rows), np.int32),
        "rewards": Ragged(np.array(rewards, np.float32), np.ones(len(rows), np.int64)),
    }
