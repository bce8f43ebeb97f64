# SPDX-License-Identifier: Apache-2.0
"""From trajectories to rows: a row a branch, shared tokens trained once, and what is sealed with them."""

from __future__ import annotations

from dataclasses import replace

from relax_core.api.batch import AttemptId, RowBatch, RowId
from relax_core.api.trajectory import Node, Outcome, Trajectory
from relax_core.rewards.host import ScoredSample
from relax_core.sampling.rows import row_batch


def given(*tokens: int, parent: int | None = None) -> Node:
    return Node(parent, tokens, False)


def sampled(*tokens: int, parent: int, version: int) -> Node:
    count = len(tokens)
    return Node(parent, tokens, True, (-0.5,) * count, (version,) * count)


TURNS = {"turns", "states", "step_rewards"}


def turned(*steps: float, value: float, forest: tuple[Node, ...] | None = None) -> tuple:
    """BRANCHING with a turn a sampled node; its turns began in the states 70, 71, ..."""
    turns = iter(range(9))
    nodes = forest or tuple(replace(node, turn=next(turns)) if node.sampled else node for node in BRANCHING)
    trajectory = Trajectory((), "", nodes, states=tuple(range(70, 74)))
    return AttemptId(7, 0, 0), trajectory, ScoredSample(value, steps=steps)


def attempt(*forest: Node, sample: int = 0, reward: float = 1.0, outcome: Outcome = Outcome.FINISHED) -> tuple:
    return (
        AttemptId(7, sample, 0),
        Trajectory((), "", forest, outcome, newest={0: max((v for node in forest for v in node.versions), default=0)}),
        ScoredSample(reward, {"exact": reward}, outcome=outcome),
    )


def listed(batch: RowBatch, name: str) -> list[list]:
    return [row.tolist() for row in batch.columns[name].rows()]


BRANCHING = (
    given(1, 2), sampled(3, parent=0, version=4), given(9, parent=1), sampled(5, 6, parent=2, version=5),
    sampled(7, parent=1, version=4), given(8), sampled(2, parent=5, version=3),
)  # fmt: skip
"""A prompt, a turn that two continuations share, and a sub-agent that starts a root of its own."""


def test_a_sample_of_three_branches_has_three_rows_and_trains_each_token_once() -> None:
    batch, (seal,) = row_batch([attempt(*BRANCHING)])
    assert batch.ids == tuple(RowId(7, 0, 0, row) for row in range(3))
    assert listed(batch, "tokens") == [[1, 2, 3, 9, 5, 6], [1, 2, 3, 7], [8, 2]]
    assert listed(batch, "loss_mask") == [[0, 0, 1, 0, 1, 1], [0, 0, 0, 1], [0, 1]]
    assert listed(batch, "weight_versions") == [[-1, -1, 4, -1, 5, 5], [-1, -1, 4, 4], [-1, 3]]
    assert batch.columns["rewards"].values.tolist() == [1.0, 1.0, 1.0]
    assert (seal.num_rows, seal.trained_tokens, seal.floor, seal.newest) == (3, 5, 3, {0: 5})
    assert (seal.attempt, seal.outcome) == (AttemptId(7, 0, 0), Outcome.FINISHED)
    assert (seal.reward, seal.parts) == (1.0, {"exact": 1.0})
    first, *_ = batch.columns["rollout_log_probs"].rows()
    assert first.tolist() == [0.0, 0.0, -0.5, 0.0, -0.5, -0.5], "given tokens have no log-prob of their own"


def test_a_sample_without_a_verdict_is_sealed_without_rows() -> None:
    judged = attempt(given(1), sampled(2, parent=0, version=4), sample=0)
    failed = attempt(given(1), sampled(2, parent=0, version=4), sample=1, outcome=Outcome.REWARD_TIMEOUT)
    batch, seals = row_batch([failed, judged], asked=TURNS)
    assert batch.ids == (RowId(7, 0, 0, 0),)
    assert [(seal.attempt.sample, seal.num_rows, seal.newest) for seal in seals] == [(1, 0, {}), (0, 1, {0: 4})]
    assert not seals[0].outcome.judged


def test_a_masked_sample_keeps_its_rows_for_statistics_and_has_no_trained_tokens() -> None:
    whole = attempt(given(1), sampled(2, parent=0, version=4), sample=0)
    cut = attempt(given(1), sampled(2, 3, parent=0, version=2), sample=1, reward=0.5, outcome=Outcome.TRUNCATED)
    unmasked, _ = row_batch([whole, cut])
    batch, seals = row_batch([whole, cut], masks_truncated=True)
    assert batch.ids == unmasked.ids
    assert all(listed(batch, name) == listed(unmasked, name) for name in unmasked.columns)
    assert [(seal.reward, seal.num_rows, seal.trained_tokens, seal.floor, seal.newest, seal.masked) for seal in seals] == [
        (1.0, 1, 1, 4, {0: 4}, False), (0.5, 1, 0, 0, {}, True),
    ]  # fmt: skip


def test_no_samples_give_an_empty_batch_with_every_column() -> None:
    batch, seals = row_batch([])
    assert (len(batch), seals) == (0, [])
    assert set(batch.columns) == {"tokens", "loss_mask", "rollout_log_probs", "weight_versions", "rewards"}
    assert {column.values.dtype.name for column in batch.columns.values()} == {"int32", "uint8", "float32"}


def test_the_newest_version_is_that_of_the_weights_and_not_of_the_cache() -> None:
    """A rollback must know that weights it gives up sampled a token, also where the token counts as older."""
    id_, trajectory, judgement = attempt(*BRANCHING)
    _, (seal,) = row_batch([(id_, replace(trajectory, newest={0: 9, 2: 8}), judgement)])
    assert (seal.floor, seal.newest) == (3, {0: 9, 2: 8})


def test_turn_columns_are_made_only_on_request() -> None:
    batch, _ = row_batch([turned(0.5, 0.0, 1.0, 2.0, value=3.5)], asked=TURNS)
    assert listed(batch, "turns") == [[-1, -1, 0, -1, 1, 1], [-1, -1, 0, 2], [-1, 3]]
    assert listed(batch, "states") == [[0, 0, 70, 0, 71, 71], [0, 0, 70, 72], [0, 73]]
    assert listed(batch, "step_rewards") == [[0, 0, 0.5, 0, 0, 0], [0, 0, 0.5, 1], [0, 2]]
    assert [batch.columns[name].values.dtype.name for name in sorted(TURNS)] == ["int64", "float32", "int32"]
    some, _ = row_batch([turned(value=1.0)], asked={"turns", "ref_log_probs"})
    assert set(some.columns) - set(row_batch([turned(value=1.0)])[0].columns) == {"turns"}
    nothing, _ = row_batch([], asked=TURNS)
    assert all(not len(nothing.columns[name]) for name in TURNS)


def test_the_last_turn_earns_uncredited_reward() -> None:
    batch, _ = row_batch([turned(0.5, value=2.0)], asked=TURNS)
    assert listed(batch, "step_rewards")[2] == [0, 1.5]
    batch, _ = row_batch([turned(value=2.0)], asked=TURNS)
    assert listed(batch, "step_rewards") == [[0] * 6, [0] * 4, [0, 2]]


def test_a_turn_without_tokens_leaves_its_reward_to_the_one_before() -> None:
    forest = (
        given(1),
        replace(sampled(2, parent=0, version=4), turn=0),
        replace(sampled(3, parent=1, version=4), turn=2),
    )
    batch, _ = row_batch([turned(1.0, 4.0, 2.0, value=7.0, forest=forest)], asked=TURNS)
    assert listed(batch, "turns") == [[-1, 0, 2]]
    assert listed(batch, "step_rewards") == [[0, 5, 2]]
