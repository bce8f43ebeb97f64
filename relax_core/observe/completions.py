# SPDX-License-Identifier: Apache-2.0
"""Metrics of a step's completions, from the values of its samples in any order. No IO."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import fsum

import numpy as np


def completion_metrics(values: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Compute the documented metrics of completions from the values of `completion_values`; none without samples.

    Sums are exact before they are rounded, so that the order of samples makes no difference.
    """
    if not (lengths := values.get("length")):
        return {}
    median, high = np.quantile(lengths, (0.5, 0.9))
    finished, repeated = values["finished"], values["repeated"]
    return {
        "length/truncated": _mean(values["truncated"]),
        "length/completion_p50": float(median),
        "length/completion_p90": float(high),
        "length/completion_max": float(max(lengths)),
        **({"length/completion_finished": _mean(finished)} if finished else {}),
        **({"length/repeated": _mean(repeated), "length/repeated_max": max(repeated)} if repeated else {}),
    }


def _mean(values: Sequence[float]) -> float:
    return fsum(values) / len(values)
