# SPDX-License-Identifier: Apache-2.0
"""Numbers that are added before they are divided: denominators of an update, metrics as (sum, count), lags, quantiles.

Denominators are counted from the claim: every row of it, those without gradient included. Needs no torch.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

import numpy as np

from relax_core.api.batch import RowBatch

# -- denominators ----------------------------------------------------------------------------------------------------


def count(rows: RowBatch) -> dict[str, float]:
    """Count trained tokens, rows, samples and groups; pairs are groups of two samples."""
    members = Counter(group for group, _ in {(row.group, row.sample) for row in rows.ids})
    return {
        "tokens": float(rows.columns["loss_mask"].values.astype(bool).sum()),
        "rows": float(len(rows)),
        "samples": float(len({row.attempt_id for row in rows.ids})),
        "groups": float(len(members)),
        "pairs": float(sum(size == 2 for size in members.values())),
    }


def total(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Add the counts of several chunks of whole groups."""
    counts: dict[str, float] = {}
    for part in parts:
        for name, number in part.items():
            counts[name] = counts.get(name, 0.0) + number
    return counts


def nominal(counts: Mapping[str, float], share: float) -> dict[str, float]:
    """Guess the counts of a whole from those of a share of it."""
    return {name: number / share for name, number in counts.items()}


def rows_with_gradient(rows: RowBatch) -> tuple[int, ...]:
    """Indices of rows in which some trained token has an advantage other than 0 (NaN is other than 0)."""
    column = rows.columns["advantages"]
    moved = (column.values != 0) & rows.columns["loss_mask"].values.astype(bool)
    row_of_token = np.repeat(np.arange(len(rows)), column.lengths)
    counts = np.bincount(row_of_token[moved], minlength=len(rows))
    return tuple(np.flatnonzero(counts).tolist())


# -- metrics ---------------------------------------------------------------------------------------------------------

Metric = tuple[float, float]
"""(sum, count): added over chunks, ranks and updates before they are divided. `..._max` and `..._min` keep the extreme of the
first value, with count 1."""


def merge_metrics(*parts: Mapping[str, Metric]) -> dict[str, Metric]:
    """Add metrics of several parts by name."""
    merged: dict[str, Metric] = {}
    for part in parts:
        for name, metric in part.items():
            merged[name] = _join(name, merged[name], metric) if name in merged else metric
    return merged


def mean(metric: Metric) -> float:
    """The number that is shown: sum / count, and 0 of nothing."""
    return metric[0] / metric[1] if metric[1] else 0.0


def _join(name: str, one: Metric, other: Metric) -> Metric:
    if not (one[1] and other[1]):
        return one if one[1] else other
    if name.endswith("_max"):
        return max(one[0], other[0]), 1.0
    if name.endswith("_min"):
        return min(one[0], other[0]), 1.0
    return one[0] + other[0], one[1] + other[1]


# -- staleness: the version at the start of the step that trains a token minus the version that sampled it ----------


def token_lags(rows: RowBatch, step: int) -> np.ndarray:
    """[trained tokens] lags, rows one after another."""
    trained = rows.columns["loss_mask"].values.astype(bool)
    versions = rows.columns["weight_versions"].values[trained].astype(np.int64)
    lags: np.ndarray = step - versions
    return lags


def check_lag(rows: RowBatch, step: int, max_staleness: int) -> int:
    """The largest lag. Raises ValueError naming the first row outside `0 <= lag <= max_staleness`; -1 is unbounded."""
    lags = token_lags(rows, step)
    if not len(lags):
        return 0
    bound = max_staleness if max_staleness >= 0 else int(lags.max())
    wrong = (lags < 0) | (lags > bound)
    if wrong.any():
        mask = rows.columns["loss_mask"]
        token = int(np.flatnonzero(mask.values)[np.argmax(wrong)])
        row = int(np.searchsorted(mask.offsets(), token, side="right")) - 1
        version = int(rows.columns["weight_versions"].values[token])
        raise ValueError(
            f"weight_versions of row {tuple(rows.ids[row])}: got version {version} in a step that starts at version {step}, "
            f"lag {step - version}; max_staleness = {max_staleness} allows 0 to {max_staleness}"
        )
    return int(lags.max())


# -- quantiles of sizes: counts in fixed buckets, so that they add up exactly however batches are cut --------------

PER_OCTAVE = 16
LEAST, MOST = -32, 8
"""Exponents of 2: sizes below count as 0, and those above as the largest. A quantile is off by at most 4.5 % of itself."""
BUCKETS = (MOST - LEAST) * PER_OCTAVE + 1
_KEY = re.compile(r"(?P<name>.+_p(?P<percent>\d\d))@(?P<bucket>\d+)")


def bucket_counts(name: str, counts: Iterable[float]) -> dict[str, Metric]:
    """Counts by bucket as metrics of a quantile, whose name ends in `_p` and its percent: `..._p99`."""
    return {f"{name}@{at}": (float(count), float(count)) for at, count in enumerate(counts) if count}


def with_quantiles(metrics: Mapping[str, Metric]) -> dict[str, Metric]:
    """Metrics as they are shown: counts of buckets are replaced by the quantile, which is never above `..._max`."""
    kept: dict[str, Metric] = {}
    counts: dict[str, dict[int, float]] = defaultdict(dict)
    for key, metric in metrics.items():
        if found := _KEY.fullmatch(key):
            counts[found["name"]][int(found["bucket"])] = metric[0]
        else:
            kept[key] = metric
    for name, own in counts.items():
        base, _, percent = name.rpartition("_p")
        most, known = metrics.get(f"{base}_max", (0.0, 0.0))
        value = _quantile(own, int(percent) / 100)
        kept[name] = (min(value, most) if known else value, 1.0)
    return kept


def _quantile(counts: Mapping[int, float], share: float) -> float:
    """The smallest size that all but the rest of the counted are at most, within its bucket by rank."""
    total = sum(counts.values())
    rank = total - 1 - int(total * (1 - share) + 1e-9)
    before = 0.0
    for bucket, count in sorted(counts.items()):
        if before + count > rank:
            inside = (rank - before + 0.5) / count
            return 2.0 ** (LEAST + (bucket - 1 + inside) / PER_OCTAVE) if bucket else 0.0
        before += count
    return 0.0
