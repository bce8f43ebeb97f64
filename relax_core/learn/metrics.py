# SPDX-License-Identifier: Apache-2.0
"""Metrics as (sum, count): added over chunks, ranks and updates before they are divided. No torch.

The one exception is in the name: `..._max` and `..._min` keep the extreme of the first value, with count 1.
"""

from __future__ import annotations

from collections.abc import Mapping

Metric = tuple[float, float]


def merge_metrics(*parts: Mapping[str, Metric]) -> dict[str, Metric]:
    """All parts as one."""
    merged: dict[str, Metric] = {}
    for part in parts:
        for name, metric in part.items():
            merged[name] = _join(name, merged[name], metric) if name in merged else metric
    return merged


def mean(metric: Metric) -> float:
    """What is shown: sum / count, and 0 of nothing."""
    return metric[0] / metric[1] if metric[1] else 0.0


def _join(name: str, one: Metric, other: Metric) -> Metric:
    if not (one[1] and other[1]):
        return one if one[1] else other
    if name.endswith("_max"):
        return max(one[0], other[0]), 1.0
    if name.endswith("_min"):
        return min(one[0], other[0]), 1.0
    return one[0] + other[0], one[1] + other[1]
