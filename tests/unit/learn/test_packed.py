# SPDX-License-Identifier: Apache-2.0
import math

import numpy as np
import pytest
import torch

from relax_core import learn
from relax_core.api import Loss, Ragged, RowBatch, RowId, Term
from relax_core.learn.packed import columns_of


def test_sums_and_means_are_over_the_trained_tokens_of_each_row(rows):
    batch = learn.PackedBatch(rows)
    values = torch.arange(14.0)
    assert batch.sequence_sum(values).tolist() == [3, 4, 6, 18, 13]
    assert batch.sequence_mean(values).tolist() == [1.5, 4, 6, 9, 13]
    assert batch.broadcast(torch.arange(5.0)).tolist() == [0, 0, 0, 1, 1, 2, 2, 3, 3, 3, 3, 4, 4, 4]


def test_gradients_flow_back_through_sums_to_trained_tokens_only(rows):
    batch = learn.PackedBatch(rows)
    values = torch.randn(14, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: batch.broadcast(batch.sequence_mean(x)).square(), values)
    batch.sequence_mean(values).sum().backward()
    assert not values.grad[~batch.loss_mask].any()


def test_a_row_without_trained_tokens_has_mean_zero(rows):
    silent = rows.with_columns({"loss_mask": Ragged(np.zeros(14, np.uint8), rows.columns["tokens"].lengths)})
    assert learn.PackedBatch(silent).sequence_mean(torch.ones(14)).tolist() == [0] * 5


def test_float_columns_are_zero_where_nothing_is_trained(rows):
    batch = learn.PackedBatch(rows)
    assert batch.advantages.tolist() == [0, 1, 1, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 3]
    assert batch.column("rewards").tolist() == [1, 0, 0, 1, 0]


def test_a_trained_first_token_is_refused(rows):
    mask = rows.columns["loss_mask"].values.copy()
    mask[3] = 1
    with pytest.raises(ValueError, match=r"row \(4, 1, 0, 0\): got 1 at position 0"):
        learn.PackedBatch(rows.with_columns({"loss_mask": Ragged(mask, rows.columns["tokens"].lengths)}))


def test_a_column_of_other_lengths_is_refused(rows):
    short = Ragged(np.zeros(13, np.float32), np.array([2, 2, 2, 4, 3]))
    with pytest.raises(ValueError, match="old_log_probs"):
        learn.PackedBatch(rows.with_columns({"old_log_probs": short})).column("old_log_probs")


def test_a_missing_column_is_named(rows):
    with pytest.raises(KeyError, match="ref_log_probs"):
        learn.PackedBatch(rows).column("ref_log_probs")


def test_what_a_trainer_computes_becomes_columns_of_tokens_and_of_rows(rows):
    made = {
        "values": torch.arange(14.0, dtype=torch.bfloat16),
        "ids": torch.arange(28).view(14, 2),
        "score": torch.arange(5),
    }
    columns = columns_of(learn.PackedBatch(rows), made)
    assert [columns[name].lengths.tolist() for name in made] == [[3, 2, 2, 4, 3], [3, 2, 2, 4, 3], [1] * 5]
    assert [str(columns[name].values.dtype) for name in made] == ["float32", "int32", "int32"]
    assert columns["ids"].values[3].tolist() == [6, 7] and columns["score"].values.tolist() == [0, 1, 2, 3, 4]


def test_arrays_that_crossed_a_process_are_read(rows):
    for column in rows.columns.values():
        column.values.setflags(write=False)
    assert learn.PackedBatch(rows).advantages.sum() == 7


def test_pairs_are_matched_by_group_and_sample():
    lengths = np.array([2, 2, 2, 2])
    mask = Ragged(np.array([0, 1] * 4, np.uint8), lengths)
    ids = (RowId(1, 1, 0, 0), RowId(0, 0, 0, 0), RowId(1, 0, 0, 0), RowId(0, 1, 0, 0))
    rows = RowBatch(ids, {"tokens": Ragged(np.zeros(8, np.int32), lengths), "loss_mask": mask})
    chosen, rejected = learn.PackedBatch(rows).pair(torch.arange(4.0))
    assert (chosen.tolist(), rejected.tolist()) == ([1, 2], [3, 0])
    with pytest.raises(ValueError, match="pairs"):
        learn.PackedBatch(rows.take([0, 1, 3])).pair(torch.arange(3.0))


def test_terms_are_divided_by_their_own_counts(rows):
    batch = learn.PackedBatch(rows)
    loss = Loss(
        {
            "tokens": Term(torch.ones(14), 2.0, "tokens"),
            "rows": Term(torch.ones(5), torch.tensor([1.0, 0, 0, 0, 4]), "rows", per="row"),
            "own": Term(torch.ones(14), denominator="mine"),
        },
        counts={"mine": torch.tensor(14.0)},
    )
    denominators = learn.Denominators(learn.count(rows))
    assert {k: float(v) for k, v in learn.reduce(loss, batch, denominators).items()} == {
        "tokens": 2,
        "rows": 1,
        "own": 7,
    }
    with pytest.raises(ValueError, match="one gradient can be rescaled once"):
        denominators.rescale(learn.count(rows))


def test_a_late_count_of_its_own_rescales_once(rows):
    batch, denominators = learn.PackedBatch(rows), learn.Denominators({})
    loss = Loss({"own": Term(torch.ones(14), denominator="mine")}, counts={"mine": torch.tensor(14.0)})
    parts = [learn.reduce(loss, batch, denominators)["own"] for _ in range(2)]
    assert float(sum(parts)) * denominators.rescale({}) == pytest.approx(0.5)


def test_an_unknown_denominator_is_refused(rows):
    with pytest.raises(ValueError, match="'pairs'"):
        learn.reduce(
            Loss({"x": Term(torch.ones(14), denominator="pairs")}),
            learn.PackedBatch(rows),
            learn.Denominators({"rows": 5}),
        )


def test_rows_without_trained_tokens_and_nan_weights_do_not_count(rows):
    mask = rows.columns["loss_mask"].values.copy()
    mask[:3] = 0
    rows = rows.with_columns({"loss_mask": Ragged(mask, rows.columns["tokens"].lengths)})
    batch = learn.PackedBatch(rows)
    weight = torch.where(batch.loss_mask, 1.0, math.nan)
    value = torch.ones(14, requires_grad=True)
    loss = Loss({"rows": Term(torch.ones(5), 1.0, "rows", per="row"), "tokens": Term(value, weight, "tokens")})
    reduced = learn.reduce(loss, batch, learn.Denominators({"rows": 1, "tokens": 1}))
    assert {k: float(v.detach()) for k, v in reduced.items()} == {"rows": 4, "tokens": 5}
    reduced["tokens"].backward()
    assert value.grad.tolist() == mask.tolist()
