# SPDX-License-Identifier: Apache-2.0
"""A figure that was not measured is absent and never 0, and no guard is blind because of that."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from relax_core.api import Ragged, RowBatch, RowId
from relax_core.api.events import EvalFinished
from relax_core.config.guard_tables import GuardsTable
from relax_core.learn.counts import measured, with_quantiles
from relax_core.learn.off_policy import Mismatch
from relax_core.observe.metrics import Totals
from relax_core.roles.divergence import DivergenceGuards
from relax_core.roles.step import _advantage_metrics

OF = "train/rollout_log_prob_diff"


@pytest.mark.parametrize(("fresh", "has_lag0"), [([True, False], True), ([False, False], False)])
def test_tokens_that_all_have_lag_show_no_mismatch_without_lag(fresh: list[bool], has_lag0: bool) -> None:
    meter = Mismatch()
    meter.add(torch.tensor([0.25, -0.5]), torch.ones(2, dtype=torch.bool), torch.tensor(fresh))
    found = measured(with_quantiles(meter.share()))
    assert found[OF] == pytest.approx(0.375)
    assert {name for name in found if "_lag0" in name} == (
        {f"{OF}_lag0", f"{OF}_lag0_max", f"{OF}_lag0_p99", "train/rollout_kl_lag0", "train/rollout_ratio_lag0_max",
         "train/rollout_ratio_lag0_min"} if has_lag0 else set()
    )  # fmt: skip


def test_the_guard_on_the_mismatch_sees_steps_whose_tokens_all_have_lag() -> None:
    guards = DivergenceGuards(GuardsTable())
    fired = [guards.judge(step, {OF: 0.9}) for step in range(1, 4)]
    ((found,),) = [one for one in fired if one]
    assert (found.guard, found.metric, found.step) == ("mismatch", OF, 3) and found.reason.startswith(f"{OF} was 0.9")


def test_the_guard_prefers_tokens_without_lag() -> None:
    guards = DivergenceGuards(GuardsTable())
    assert not any(guards.judge(step, {OF: 0.9, f"{OF}_lag0": 0.01}) for step in range(1, 9))


@pytest.mark.parametrize(
    ("advantages", "share"),
    [
        ([0.0, 0.0, 0.0, 0.0], 1.0),
        ([0.0, 0.0, 0.5, -0.5], 0.5),
        ([1.0, -1.0, 0.0, 2.0], 0.0),
        ([9.0, 0.0, 0.0, 0.0], 1.0),
    ],
)
def test_groups_without_advantage_are_counted_apart(advantages: list[float], share: float) -> None:
    lengths, mask = np.ones(4, np.int64), np.ones(4, np.uint8)
    mask[0] = advantages[0] != 9.0  # an untrained token has no advantage, whatever its column says
    columns = {"loss_mask": Ragged(mask, lengths), "advantages": Ragged(np.array(advantages, np.float32), lengths)}
    ids = tuple(RowId(group, sample, 0, 0) for group in (1, 2) for sample in (0, 1))
    assert _advantage_metrics(RowBatch(ids, columns)) == {"reward/no_advantage": share}


def test_an_evaluation_in_which_no_sample_was_judged_has_no_mean() -> None:
    totals = Totals()
    found = totals.evaluated(EvalFinished(0, "held-out", math.nan, 0, 1.0, {"failed": 4.0}))
    assert "eval/held-out/mean" not in found and found["eval/held-out/failed"] == 4.0
    assert totals.summary()["eval_last"]["mean"] is None
