# SPDX-License-Identifier: Apache-2.0
"""What is told of one step of the critic: its loss, and how much of the returns its values explained. No IO, no torch."""

from __future__ import annotations

import numpy as np

from relax_core.learn.metrics import mean, merge_metrics
from relax_core.roles.step import Step


def critic_metrics(step: Step, seconds: float) -> dict[str, float]:
    merged = merge_metrics(*(result.metrics for result in step.results))
    return {
        **{name: mean(metric) for name, metric in merged.items()},
        **_explained(step),
        "critic/grad_norm": float(np.mean([result.grad_norm for result in step.results])),
        "critic/lr": step.results[-1].lr,
        "time/critic_s": seconds,
    }


def _explained(step: Step) -> dict[str, float]:
    """Of the values that the advantages were made with, before this step's updates."""
    columns = step.rows.columns
    if not {"values", "returns"} <= columns.keys():
        return {}
    trained = columns["loss_mask"].values.astype(bool)
    values, returns = columns["values"].values[trained], columns["returns"].values[trained]
    if not len(returns):
        return {}
    spread = float(returns.var())
    explained = {"critic/explained_variance": 1.0 - float((returns - values).var()) / spread} if spread > 0 else {}
    return {**explained, "critic/value_mean": float(values.mean()), "critic/return_mean": float(returns.mean())}
