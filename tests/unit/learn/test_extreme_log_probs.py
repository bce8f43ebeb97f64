# SPDX-License-Identifier: Apache-2.0
"""Losses and gradients of every algorithm stay finite in float32, however far the policies are from each other."""

import math

import pytest
import torch

from tests.golden.bench import NAMES, build, draw_groups, flat, learnt, rows_of

FAR = [(-95.0, -1.0), (-1.0, -95.0), (-1e5, -1e-6), (-1e-6, -1e5)]
CASES = [
    *((name, {}) for name in NAMES),
    *(("gspo", {"correction": correction, "correction_level": "sequence"}) for correction in ("truncate", "mask")),
    ("grpo", {"kl_estimator": "k3"}),
    ("dppo", {"divergence": "kl", "correction": "none"}),
    *(("grpo", {"correction": correction, "dual_clip": 0.0}) for correction in ("none", "mask", "reject", "truncate")),
    *(("distillation", {"divergence": divergence}) for divergence in ("reverse", "forward", "jsd")),
    *(("distillation", {"mode": "loss", "divergence": divergence}) for divergence in ("reverse", "forward")),
]


def rows_at(log_prob, others, advantage):
    """Rows whose first trained token has `log_prob` under the policy, and `others` under every other model."""
    rows = rows_of(draw_groups(0), [[advantage] * 3] * 3)
    for row in rows:
        place = row["mask"].index(1)
        row["log_probs"][place] = log_prob
        for name in ("old", "rollout", "ref"):
            row[name][place] = others
        row["teacher"] = row["ref"]
    return rows


@pytest.mark.parametrize(("name", "options"), CASES, ids=[f"{name} {options or ''}" for name, options in CASES])
def test_losses_gradients_and_metrics_are_finite_for_extreme_log_probs(name, options):
    algorithm = build(name, {"kl_coef": 0.1, "kl_estimator": "unbiased", **options})
    for advantage in (1.0, -1.0):
        for log_prob, others in FAR:
            rows = rows_at(log_prob, others, advantage)
            loss, slopes, metrics = learnt(algorithm, rows, dtype=torch.float32)
            assert math.isfinite(loss) and all(map(math.isfinite, flat(slopes)))
            assert all(math.isfinite(total) for total, _ in metrics.values())
            if "policy/ref_kl_clamped" in metrics:
                assert metrics["policy/ref_kl_clamped"][0] == len(rows) * (others > log_prob)
