# SPDX-License-Identifier: Apache-2.0
"""What a shell computes without torch: counts, rows with gradient, lag, merged metrics, the learning rate."""

import subprocess
import sys
from dataclasses import replace

import pytest

from relax_core import learn
from relax_core.api import ConfigError, OptimizerSpec


def test_counts_are_of_tokens_rows_samples_and_groups(rows):
    assert learn.count(rows) == {"tokens": 7, "rows": 5, "samples": 4, "groups": 2, "pairs": 2}


def test_a_row_has_gradient_where_a_trained_token_has_an_advantage(rows):
    assert learn.rows_with_gradient(rows) == (0, 2, 4)


def test_the_largest_lag_is_told(rows):
    assert learn.check_lag(rows, 7, 1) == 1
    assert learn.check_lag(rows, 60, -1) == 54


def test_a_lag_beyond_the_bound_names_row_and_versions(rows):
    with pytest.raises(
        ValueError, match=r"row \(4, 0, 0, 0\): got version 6 in a step that starts at version 8, lag 2"
    ):
        learn.check_lag(rows, 8, 1)


@pytest.mark.parametrize("bound", [0, 3, -1])
def test_tokens_of_a_later_version_are_refused_whatever_the_bound(rows, bound):
    with pytest.raises(ValueError, match=r"row \(4, 0, 0, 0\): got version 7"):
        learn.check_lag(rows, 6, bound)


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


def test_planning_and_counting_do_not_load_torch():
    code = (
        "import sys; from relax_core import learn; "
        "learn.count, learn.rows_with_gradient, learn.check_lag; "
        "learn.plan_micro_batches, learn.merge_metrics, learn.lr_factor; "
        "import relax_plugin_torch.trainer, relax_plugin_policy_gradient.grpo; "
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=600, check=False).returncode == 0
