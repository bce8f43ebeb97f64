# SPDX-License-Identifier: Apache-2.0
"""From trajectories to rows: a row a branch, shared tokens trained once, and what is sealed with them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from relax_core.api.batch import AttemptId, RowId
from relax_core.api.outcome import Outcome
from relax_core.api.trajectory import Node, Trajectory
from relax_core.rollout.judge import Judgement
from relax_core.rollout.rows import row_batch


def given(*tokens: int, parent: int | None = None) -> Node:
    return Node(parent, tokens, False)


def sampled(*tokens: int, parent: int, version: int) -> Node:
    count = len(tokens)
    return Node(parent, tokens, True, (-0.5,) * count, (version,) * count)


def attempt(*forest: Node, sample: int = 0, reward: float = 1.0, outcome: Outcome = Outcome.FINISHED) -> tuple:
    return (
        AttemptId(7, sample, 0),
        Trajectory((), "", forest, outcome),
        Judgement(reward, {"exact": reward}, outcome=outcome),
    )


BRANCHING = (
    given(1, 2), sampled(3, parent=0, version=4), given(9, parent=1), sampled(5, 6, parent=2, version=5),
    sampled(7, parent=1, version=4), given(8), sampled(2, parent=5, version=3),
)  # fmt: skip
"""A prompt, a turn that two continuations share, and a sub-agent that starts a root of its own."""


def test_a_sample_of_three_branches_has_three_rows_and_trains_each_token_once() -> None:
    batch, (seal,) = row_batch([attempt(*BRANCHING)])
    assert batch.ids == tuple(RowId(7, 0, 0, row) for row in range(3))
    rows = {
        name: [row.tolist() for row in batch.columns[name].rows()]
        for name in ("tokens", "loss_mask", "weight_versions")
    }
    assert rows["tokens"] == [[1, 2, 3, 9, 5, 6], [1, 2, 3, 7], [8, 2]]
    assert rows["loss_mask"] == [[0, 0, 1, 0, 1, 1], [0, 0, 0, 1], [0, 1]]
    assert rows["weight_versions"] == [[-1, -1, 4, -1, 5, 5], [-1, -1, 4, 4], [-1, 3]]
    assert batch.columns["rewards"].values.tolist() == [1.0, 1.0, 1.0]
    assert (seal.num_rows, seal.trained_tokens, seal.floor, seal.newest) == (3, 5, 3, 5)
    assert (seal.attempt, seal.outcome, seal.reward, seal.parts) == (
        AttemptId(7, 0, 0),
        Outcome.FINISHED,
        1.0,
        {"exact": 1.0},
    )


def test_given_tokens_have_no_log_prob_of_their_own() -> None:
    batch, _ = row_batch([attempt(*BRANCHING)])
    log_probs = batch.columns["rollout_log_probs"]
    assert log_probs.values.dtype == np.float32
    assert next(log_probs.rows()).tolist() == [0.0, 0.0, -0.5, 0.0, -0.5, -0.5]


def test_a_sample_without_a_verdict_is_sealed_without_rows() -> None:
    judged = attempt(given(1), sampled(2, parent=0, version=4), sample=0)
    failed = attempt(given(1), sampled(2, parent=0, version=4), sample=1, outcome=Outcome.REWARD_TIMEOUT)
    batch, seals = row_batch([failed, judged])
    assert batch.ids == (RowId(7, 0, 0, 0),)
    assert [(seal.attempt.sample, seal.num_rows, seal.newest) for seal in seals] == [(1, 0, None), (0, 1, 4)]
    assert not seals[0].outcome.judged


def test_nothing_becomes_a_batch_of_nothing_with_every_column() -> None:
    batch, seals = row_batch([])
    assert (len(batch), seals) == (0, [])
    assert set(batch.columns) == {"tokens", "loss_mask", "rollout_log_probs", "weight_versions", "rewards"}
    assert {column.values.dtype.name for column in batch.columns.values()} == {"int32", "uint8", "float32"}


def test_the_newest_version_is_that_of_the_weights_whatever_their_cache_was() -> None:
    """A rollback must know that weights it gives up sampled a token, also where the token counts as older."""
    id_, trajectory, judgement = attempt(*BRANCHING)
    _, (seal,) = row_batch([(id_, replace(trajectory, newest=9), judgement)])
    assert (seal.floor, seal.newest) == (3, 9)
