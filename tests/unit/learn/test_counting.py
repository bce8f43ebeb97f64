# SPDX-License-Identifier: Apache-2.0
"""What a shell computes without torch: counts, rows with gradient, lag, merged metrics, the learning rate."""

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, strategies as st

from relax_core import learn
from relax_core.api import ConfigError, OptimizerSpec, Ragged, RowBatch, RowId


def test_counts_are_of_tokens_rows_samples_and_groups(rows):
    assert learn.count(rows) == {"tokens": 7, "rows": 5, "samples": 4, "groups": 2, "pairs": 2}


def test_a_row_has_gradient_where_a_trained_token_has_an_advantage(rows):
    assert learn.rows_with_gradient(rows) == (0, 2, 4)
    broken = rows.columns["advantages"].values.copy()
    broken[[3, 4, 8]] = np.nan  # a given token of row 1 and its trained one, and a trained one of row 3
    broken[13] = 0.0
    column = Ragged(broken, rows.columns["advantages"].lengths)
    assert learn.rows_with_gradient(rows.with_columns({"advantages": column})) == (0, 1, 2, 3), "NaN is not 0"


def test_a_lag_beyond_the_bound_names_row_and_versions(rows):
    with pytest.raises(
        ValueError, match=r"row \(4, 0, 0, 0\): got version 6 in a step that starts at version 8, lag 2"
    ):
        learn.check_lag(rows, 8, 1)


def test_a_trained_token_that_nobody_sampled_names_the_mask(rows):
    versions = np.where(np.arange(len(rows.columns["tokens"].values)) == 0, -1, 8).astype(np.int32)
    columns = {**rows.columns, "weight_versions": Ragged(versions, rows.columns["tokens"].lengths)}
    columns["loss_mask"] = Ragged(np.ones_like(versions), rows.columns["tokens"].lengths)
    for step, max_staleness in ((8, 1), (0, 1), (0, -1)):
        columns["weight_versions"] = Ragged(np.minimum(versions, step), rows.columns["tokens"].lengths)
        with pytest.raises(
            ValueError, match=r"loss_mask of row \(.*\): token 0 is trained, but the policy did not sample it"
        ):
            learn.check_lag(RowBatch(rows.ids, columns), step, max_staleness)


@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=5), min_size=1, max_size=4))
def test_one_token_outside_the_staleness_bound_is_refused(versions):
    flat = np.array([version for row in versions for version in (-1, *row)], np.int32)
    lengths = np.array([1 + len(row) for row in versions])
    columns = {"weight_versions": Ragged(flat, lengths), "loss_mask": Ragged((flat >= 0).astype(np.uint8), lengths)}
    rows = RowBatch(tuple(RowId(number, 0, 0, 0) for number in range(len(versions))), columns)
    lags = [7 - version for row in versions for version in row]
    for bound, allowed in ((2, "max_staleness = 2 allows 0 to 2"), (-1, "row .*: got version")):
        if min(lags) >= 0 and (bound < 0 or max(lags) <= bound):
            assert learn.check_lag(rows, 7, bound) == max(lags)
        else:
            with pytest.raises(ValueError, match=allowed):
                learn.check_lag(rows, 7, bound)


def test_metrics_add_up_and_extremes_stay_extremes():
    merged = learn.merge_metrics(
        {"a/x": (3.0, 2.0), "a/x_max": (5.0, 1.0), "a/x_min": (1.0, 1.0)},
        {"a/x": (1.0, 2.0), "a/x_max": (9.0, 1.0), "a/x_min": (4.0, 1.0)},
        {"a/x": (0.0, 0.0), "a/x_max": (0.0, 0.0), "a/x_min": (0.0, 0.0)},
    )
    assert merged == {"a/x": (4.0, 4.0), "a/x_max": (9.0, 1.0), "a/x_min": (1.0, 1.0)}
    assert learn.mean(merged["a/x"]) == 1.0


def test_the_rate_warms_up_and_ends_at_zero():
    spec = OptimizerSpec(1.0, schedule="linear", warmup_steps=4, total_steps=14)
    assert [learn.lr_factor(spec, step) for step in (0, 3, 4, 9, 14, 20)] == [0.25, 1.0, 1.0, 0.5, 0.0, 0.0]
    cosine = OptimizerSpec(1.0, schedule="cosine", total_steps=10)
    assert [learn.lr_factor(cosine, step) for step in (0, 5, 10)] == pytest.approx([1.0, 0.5, 0.0])
    assert learn.lr_factor(OptimizerSpec(1.0), 10**6) == 1.0
    late = replace(spec, first_step=20, total_steps=spec.total_steps + 20)
    assert [learn.lr_factor(late, step + 20) for step in range(-20, 21)] == [
        learn.lr_factor(spec, max(0, step)) for step in range(-20, 21)
    ]


@pytest.mark.parametrize("spec", [OptimizerSpec(1.0, schedule="square"), OptimizerSpec(1.0, schedule="linear")])
def test_a_schedule_that_cannot_be_followed_is_refused(spec):
    with pytest.raises(ConfigError, match="schedule"):
        learn.lr_factor(spec, 3)


LIGHT = """
import sys
import relax_plugin_torch.trainer
from relax_core import learn
from relax_core.registry import Catalogue
learn.count, learn.rows_with_gradient, learn.check_lag, learn.plan_micro_batches, learn.merge_metrics, learn.lr_factor
catalogue = Catalogue.load()
for name in catalogue.names("algorithm"):
    made = catalogue.target("algorithm", name)()
    assert made.columns() is not None and made.outputs() and made.denominators, name
print({"torch", "transformers"} & set(sys.modules))
"""


def test_planning_with_any_algorithm_and_counting_load_no_torch():
    said = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True, timeout=600, check=True)
    assert said.stdout.strip() == "set()"
