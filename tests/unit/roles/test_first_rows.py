# SPDX-License-Identifier: Apache-2.0
"""The facts about the rows of step 1: which tokens are trained, how turns end, and how log-probs differ."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from relax_core.api.batch import Ragged, RowBatch, RowId
from relax_core.roles.first_rows import compared_rows, log_prob_facts, row_facts

EOS = 2


def batch(rows: list[list[tuple[int, int, int]]]) -> RowBatch:
    """Rows of (token, trained, version) triples; version -1: a given token."""
    lengths = np.array([len(row) for row in rows], np.int64)
    flat = np.array([token for row in rows for token in row], np.int32).reshape(-1, 3)
    columns = {
        "tokens": Ragged(flat[:, 0], lengths), "loss_mask": Ragged(flat[:, 1].astype(np.uint8), lengths),
        "weight_versions": Ragged(flat[:, 2], lengths),
    }  # fmt: skip
    return RowBatch(tuple(RowId(number, 0, 0, 0) for number in range(len(rows))), columns)


def turns(*masks: str) -> RowBatch:
    """Rows `given given sampled sampled EOS given sampled EOS` with these masks."""
    tokens, versions = (5, 6, 7, 8, EOS, 6, 9, EOS), (-1, -1, 0, 0, 0, -1, 0, 0)
    return batch([[(token, int(one), version) for token, one, version in zip(tokens, mask, versions, strict=True)]
                  for mask in masks])  # fmt: skip


RIGHT, LEFT, LATE, FIRST = "00111011", "01110110", "00011001", "00111000"


def test_a_right_mask_trains_every_turn_to_its_end() -> None:
    assert row_facts(turns(RIGHT, RIGHT)) == {
        "samples": 2, "trained": 10, "turns": 4, "ends": [(EOS, 4, 4)], "empty": [],
        "wrongly_trained": [], "untrained": [], "given": 0, "partly": 0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("mask", "wrong", "example"),
    [
        (
            LEFT, {"given": 2, "partly": 2, "ends": [(EOS, 2, 0)], "turns": 2},
            ["token 1 (id 6) of group 0, sample 0 is trained and was given",
             "token 5 (id 6) of group 0, sample 0 is trained and was given",
             "token 4 (id 2) of group 0, sample 0 was sampled and is not trained",
             "token 7 (id 2) of group 0, sample 0 was sampled and is not trained"],
        ),
        (
            LATE, {"given": 0, "partly": 2, "ends": [(EOS, 2, 2)]},
            ["token 2 (id 7) of group 0, sample 0 was sampled and is not trained",
             "token 6 (id 9) of group 0, sample 0 was sampled and is not trained"],
        ),
        (FIRST, {"given": 0, "partly": 0, "ends": [(EOS, 1, 1)], "turns": 1}, []),
    ],
)  # fmt: skip
def test_a_moved_mask_is_found_and_a_turn_of_another_row_is_not(
    mask: str, wrong: dict[str, Any], example: list[str]
) -> None:
    found = row_facts(turns(mask))
    assert {key: found[key] for key in wrong} == wrong and [*found["wrongly_trained"], *found["untrained"]] == example


def test_turns_of_neighbouring_rows_are_not_one_turn() -> None:
    rows = batch([[(7, 1, 0), (8, 1, 0)], [(9, 1, 0)], [(5, 0, -1)]])
    found = row_facts(rows)
    assert found["turns"] == 2 and found["ends"] == [(8, 1, 1), (9, 1, 1)] and found["empty"] == ["group 2, sample 0"]


def test_a_sample_is_trained_if_one_of_its_rows_is() -> None:
    rows = turns(RIGHT, "0" * 8)
    rows = RowBatch((RowId(0, 0, 0, 0), RowId(0, 0, 0, 1)), rows.columns)
    assert row_facts(rows)["empty"] == [] and row_facts(rows)["samples"] == 1


def test_rows_of_a_dataset_have_turns_of_trained_tokens_and_no_batch_has_none() -> None:
    rows = turns(RIGHT)
    given = RowBatch(rows.ids, {name: rows.columns[name] for name in ("tokens", "loss_mask")})
    found = row_facts(given)
    assert found["turns"] == 2 and found["ends"] == [(EOS, 2, 2)] and "given" not in found
    assert row_facts(batch([]))["samples"] == 0


def test_the_shortest_rows_with_trained_tokens_are_compared() -> None:
    row, long, empty = [(7, 1, 0)] * 3, [(7, 1, 0)] * 9, [(7, 0, 0)]
    assert compared_rows(batch([long, row, empty, row, row, long, row])) == [1, 3, 4, 6]
    assert compared_rows(batch([empty])) == []


def with_log_probs(**names: list[float]) -> RowBatch:
    rows = batch([[(5, 0, -1), (7, 1, 0), (8, 1, 0)], [(5, 0, -1), (9, 1, 0)]])
    lengths = rows.columns["tokens"].lengths
    return rows.with_columns({name: Ragged(np.array(values, np.float32), lengths) for name, values in names.items()})


def test_the_tokens_that_differ_most_are_named_beside_the_reference() -> None:
    rows = with_log_probs(rollout_log_probs=[0, -1.0, -2.0, 0, -3.0], ref_log_probs=[0, -1.5, -2.0, 0, -1.0])
    trainer = Ragged(np.array([0, -1.5, -2.0, 0, -1.0], np.float32), rows.columns["tokens"].lengths)
    found = log_prob_facts(rows, trainer)
    assert found["worst"] == [(1, 0, 1, 9, -3.0, -1.0, -1.0), (0, 0, 1, 7, -1.0, -1.5, -1.5)]
    assert (
        found["engine_trainer"] == pytest.approx(2.5 / 3)
        and found["trainer_reference"] == 0.0
        and found["engine_reference"] == pytest.approx(2.5 / 3)
    )


def test_without_a_reference_only_engine_and_trainer_are_compared() -> None:
    rows = with_log_probs(rollout_log_probs=[0, -1.0, -2.0, 0, -3.0])
    found = log_prob_facts(rows, rows.columns["rollout_log_probs"])
    worst = [(0, 0, 1, 7, -1.0, -1.0, None), (0, 0, 2, 8, -2.0, -2.0, None)]
    assert found == {"worst": worst, "engine_trainer": 0.0}
