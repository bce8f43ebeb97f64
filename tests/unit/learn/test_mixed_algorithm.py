# SPDX-License-Identifier: Apache-2.0
"""Several algorithms of one run: each learns from its own rows, and one of them given twice is that one."""

import numpy as np
import pytest
import torch

from relax_core import learn
from relax_core.api import AttemptId, Chosen, Outcome, Ragged, RowBatch, RowId, Sealed, Term
from relax_core.learn.groups import MixedAlgorithm, OwnRows, credited
from relax_core.registry import Catalogue

CATALOGUE = Catalogue.load()
ROWS = [(group, sample) for group in range(4) for sample in range(3)]
LENGTHS = np.array([3 + (5 * at) % 4 for at in range(len(ROWS))])
OF_GROUP = [0, 1, 1, 0]
"""Which algorithm each group has."""
MASKED = ("old_log_probs", "rollout_log_probs", "ref_log_probs", "advantages")


def several(*parts):
    """(name, options) each."""
    chosen = tuple(Chosen("algorithm", name, options) for name, options in parts)
    return CATALOGUE.build(Chosen("algorithm", parts[0][0], parts=chosen))


@pytest.fixture
def rows():
    random = np.random.default_rng(3)
    total = int(LENGTHS.sum())
    starts = np.cumsum(LENGTHS) - LENGTHS
    mask = (random.random(total) < 0.8).astype(np.uint8)
    mask[starts], mask[starts + 1] = 0, 1

    def numbers():
        return Ragged(-np.abs(random.normal(size=total)) - 0.1, LENGTHS)

    columns = {
        "tokens": Ragged(np.arange(total, dtype=np.int32), LENGTHS),
        "loss_mask": Ragged(mask, LENGTHS),
        **{name: numbers() for name in MASKED},
        "turns": Ragged(np.where(mask, 0, -1).astype(np.int32), LENGTHS),
        "states": Ragged(np.zeros(total, np.int64), LENGTHS),
        "step_rewards": Ragged(np.repeat([reward(*row) for row in ROWS], LENGTHS).astype(np.float32), LENGTHS),
        "algorithm_index": Ragged(
            np.array([OF_GROUP[group] for group, _ in ROWS], np.int32), np.ones(len(ROWS), np.int64)
        ),
    }
    return RowBatch(tuple(RowId(group, sample, 0, 0) for group, sample in ROWS), columns)


def reward(group, sample):
    return float((group + 2 * sample) % 3)


SAMPLES = {AttemptId(*row, 0): Sealed(AttemptId(*row, 0), 1, Outcome.FINISHED, reward(*row)) for row in ROWS}


def log_probs(rows):
    """Of the policy: near the others, the same for a row whatever it is learnt with."""
    return torch.tensor(rows.columns["old_log_probs"].values + 0.1 * np.cos(rows.columns["tokens"].values))


def learnt(algorithm, rows, counted=None):
    """(loss, gradient [tokens], metrics)."""
    leaf = log_probs(rows).requires_grad_()
    batch = learn.PackedBatch(rows, dtype=torch.float64)
    loss = algorithm.loss(batch, learn.Outputs({"log_probs": leaf, "entropy": leaf.detach().abs()}))
    total = sum(learn.reduce(loss, batch, learn.Denominators(learn.count(counted or rows))).values())
    total.backward()
    return float(total.detach()), leaf.grad.numpy(), {n: (float(a), float(b)) for n, (a, b) in loss.metrics.items()}


def own(rows, number):
    return [at for at, row in enumerate(rows.ids) if OF_GROUP[row.group] == number]


OTHERS = [
    ("grpo", {"kl_coef": 0.1}), ("gspo", {}), ("dr-grpo", {}), ("gigpo", {}),
    ("sapo", {"correction": "reject", "correction_level": "geometric"}), ("rloo", {"sequence_mask_delta": 0.05}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options"), OTHERS, ids=[name for name, _ in OTHERS])
def test_each_row_has_its_own_algorithm_s_gradient_and_no_other(rows, name, options):
    """By the counts of the whole batch, whoever's rows are in it."""
    mixed = several(("grpo", {}), (name, options))
    loss, gradient, metrics = learnt(mixed, rows)
    expected, parts = 0.0, []
    for number, part in enumerate(mixed.parts):
        alone = rows.take(own(rows, number))
        share, slopes, of_part = learnt(part, alone, counted=rows)
        expected += share
        parts.append(of_part)
        np.testing.assert_allclose(gradient[alone.columns["tokens"].values], slopes, rtol=1e-9, atol=1e-12)
    assert loss == pytest.approx(expected, abs=1e-12)
    for key, metric in learn.merge_metrics(*parts).items():
        assert metrics[key] == pytest.approx(metric), key


def test_one_algorithm_given_twice_equals_that_algorithm(rows):
    one = CATALOGUE.build(Chosen("algorithm", "grpo", {"entropy_coef": 0.01}))
    two = several(("grpo", {"entropy_coef": 0.01}), ("grpo", {"entropy_coef": 0.01}))
    (loss, gradient, metrics), (again, slopes, more) = learnt(one, rows), learnt(two, rows)
    assert again == pytest.approx(loss, abs=1e-12)
    np.testing.assert_allclose(slopes, gradient, rtol=1e-12, atol=1e-15)
    assert all(more[name] == pytest.approx(metric) for name, metric in metrics.items())
    assert more["grpo/approx_kl"][1] + more["grpo-2/approx_kl"][1] == metrics["policy/approx_kl"][1]
    credit = credited(two, rows, SAMPLES, ("loss_mask",))["advantages"].values
    assert credit.tolist() == credited(one, rows, SAMPLES, ("loss_mask",))["advantages"].values.tolist()


@pytest.mark.parametrize("order", [range(12), [7, 3, 11, 0, 1, 9, 4, 2, 10, 5, 8, 6]])
def test_groups_are_credited_by_their_own(rows, order):
    mixed = several(("dr-grpo", {}), ("gigpo", {"step_weight": 1.0}))
    asked = ("loss_mask", "turns", "states", "step_rewards")
    shuffled = rows.take(list(order))
    got = credited(mixed, shuffled, SAMPLES, asked)["advantages"]
    for number, part in enumerate(mixed.parts):
        for group in (group for group, index in enumerate(OF_GROUP) if index == number):
            at = [place for place, row in enumerate(shuffled.ids) if row.group == group]
            members = {attempt: sealed for attempt, sealed in SAMPLES.items() if attempt.group == group}
            alone = credited(part, shuffled.take(at), members, asked)["advantages"]
            assert got.take(at).values.tolist() == alone.values.tolist()


def test_chunks_with_rows_of_one_algorithm_alone_are_chunks(rows):
    mixed = several(("grpo", {}), ("cispo", {}))
    loss, gradient, _ = learnt(mixed, rows)
    total = 0.0
    for part in (own(rows, 0), own(rows, 1), []):
        if part:
            chunk = rows.take(part)
            share, slopes, _ = learnt(mixed, chunk, counted=rows)
            total += share
            np.testing.assert_allclose(gradient[chunk.columns["tokens"].values], slopes, rtol=1e-9, atol=1e-12)
    assert total == pytest.approx(loss, abs=1e-12)


def test_values_in_rows_of_another_algorithm_change_nothing(rows):
    """A column that one algorithm reads may be anything in rows of the other."""
    mixed = several(("grpo", {}), ("grpo", {"correction": "truncate", "kl_coef": 0.1}))
    loss, gradient, _ = learnt(mixed, rows)
    mine = np.repeat([OF_GROUP[row.group] == 0 for row in rows.ids], LENGTHS)
    reference = np.where(mine, np.inf, rows.columns["ref_log_probs"].values)
    again, slopes, _ = learnt(mixed, rows.with_columns({"ref_log_probs": Ragged(reference, LENGTHS)}))
    assert again == loss
    assert slopes.tolist() == gradient.tolist()


def test_the_union_of_columns_and_outputs_is_requested():
    mixed = several(("grpo", {"kl_coef": 0.1}), ("gigpo", {}), ("grpo", {"entropy_coef": 0.1, "aggregation": "token"}))
    assert isinstance(mixed, MixedAlgorithm)
    assert {column.name for column in mixed.columns()} >= {"ref_log_probs", "rollout_log_probs", "algorithm_index"}
    credit = {column.name for column in mixed.advantage_columns()}
    assert credit == {"turns", "states", "step_rewards", "algorithm_index"}
    assert {output.name for output in mixed.outputs()} == {"log_probs", "entropy"}
    assert mixed.denominators == {"samples", "tokens"}
    assert not mixed.zero_advantage_skips and mixed.reads_rewards
    assert several(("grpo", {}), ("reinforce-plus-plus", {})).statistics == "batch"


def test_columns_are_prepared_per_algorithm_for_its_own_rows(rows):
    mixed = several(("grpo", {}), ("m2po", {"second_moment": 0.01}))
    made = learn.prepared_columns(mixed, rows)["trusted"]
    alone = learn.prepared_columns(mixed.parts[1], rows.take(own(rows, 1)))["trusted"]
    trained = rows.columns["loss_mask"].take(own(rows, 1)).values.astype(bool)
    assert made.take(own(rows, 1)).values[trained].tolist() == alone.values[trained].tolist()
    assert not made.take(own(rows, 0)).values.any()


def test_a_term_covers_only_the_trained_tokens_of_its_algorithm(rows):
    batch = learn.PackedBatch(rows, dtype=torch.float64)
    index = batch.column("algorithm_index")
    for number in (0, 1):
        kept = OwnRows(batch, index == number).only(Term(torch.ones(len(batch.tokens), dtype=torch.float64))).value
        mine = np.repeat([OF_GROUP[group] == number for group, _ in ROWS], LENGTHS)
        assert kept.bool().tolist() == (mine & (rows.columns["loss_mask"].values == 1)).tolist()
