# SPDX-License-Identifier: Apache-2.0
"""A first step as it has to be is told in one line; each thing that is not so is named with its number and what to look at."""

from __future__ import annotations

import math
from typing import Any

import pytest

from relax_core.views.first_step import first_step_checks, first_step_lines

WELL = {
    "train/rollout_log_prob_diff_lag0": 8e-8, "train/rollout_log_prob_diff_max": 7e-7, "policy/ratio_max": 1.0000001,
    "policy/ref_kl": 2e-14, "tokens/trained": 90.0, "reward/mean": 0.6, "reward/std": 0.48, "train/grad_norm": 0.9,
    "train/skipped_updates": 0.0, "samples/issued": 32.0, "samples/trained": 16.0, "samples/no_gradient": 4.0,
}  # fmt: skip
CONFIG: dict[str, Any] = {"model": {"dtype": "float32"}, "batch": {"updates_per_step": 1}}


def test_a_sound_step_is_reported_in_one_line() -> None:
    (line,) = first_step_lines(first_step_checks(WELL, CONFIG))
    assert line == (
        "step 1: engine and trainer agree (|log-prob difference| 8.0e-08), the ratio is 1 (at most 1), "
        "policy and reference agree (KL 2.0e-14), tokens are trained (90), rewards differ (mean 0.6, spread 0.48), "
        "the gradient is finite and not 0 (norm 0.9), samples are judged (0 of 32 failed)"
    )


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (
            {"train/rollout_log_prob_diff_lag0": 0.2},
            "engine and trainer agree: |log-prob difference| 2.0e-01; check that both",
        ),
        ({"policy/ratio_max": 1.4}, "the ratio is 1: at most 1.4; before an update"),
        ({"policy/ref_kl": 0.3}, "policy and reference agree: KL 3.0e-01; both must start"),
        ({"tokens/trained": 0.0}, "tokens are trained: 0; every token is masked"),
        ({"reward/std": 0.0}, "rewards differ: mean 0.6, spread 0; all samples earn the same"),
        (
            {"train/grad_norm": 0.0, "samples/no_gradient": 16.0},
            "the gradient is finite and not 0: norm 0; 16 of 16 samples have no gradient",
        ),
        ({"train/grad_norm": math.inf}, "the gradient is finite and not 0: norm inf"),
        ({"train/skipped_updates": 1.0}, "the update was not finite and was skipped"),
        ({"samples/dropped/failed": 20.0}, "samples are judged: 20 of 32 failed; see their outcomes"),
    ],
)
def test_a_failed_first_step_check_is_named_with_its_number(broken: dict[str, float], said: str) -> None:
    well, odd = first_step_lines(first_step_checks(WELL | broken, CONFIG))
    assert said in odd and odd.startswith("step 1: check failed: ") and said.partition(":")[0] not in well


def test_formats_and_what_the_run_does_decide_what_is_looked_at() -> None:
    coarse = {**CONFIG, "model": {"dtype": "bfloat16"}}
    far = WELL | {"train/rollout_log_prob_diff_lag0": 0.05, "policy/ratio_max": 1.09}
    assert all(check.is_so for check in first_step_checks(far, coarse))
    several = {**CONFIG, "batch": {"updates_per_step": 4}}
    names = [check.name for check in first_step_checks(WELL | {"policy/ratio_max": 1.4}, several)]
    assert "the ratio is 1" not in names, "later updates of the step have moved"
    assert [check.name for check in first_step_checks({"train/grad_norm": 0.5}, CONFIG)] == [
        "the gradient is finite and not 0"
    ]
    assert first_step_lines(first_step_checks({}, CONFIG)) == []
