# SPDX-License-Identifier: Apache-2.0
"""The denominators of an update, counted from the claim: every row of it, those without gradient included. No torch.

Which rows have a gradient where a zero advantage means there is none (`Algorithm.zero_advantage_skips`). No torch.

Metrics as (sum, count): added over chunks, ranks and updates before they are divided. No torch.

The one exception is in the name: `..._max` and `..._min` keep the extreme of the first value, with count 1.

The bound on staleness, asserted where it matters: on the rows a trainer is about to train. No torch.

`lag(token)` is the version at the start of the step that trains it minus the version that sampled it,
over tokens with `loss_mask = 1`.

Quantiles of sizes as (sum, count) metrics: counts in buckets that are the same everywhere, so that they add up exactly over
micro-batches, ranks and updates however those are cut. No torch.

Buckets are spaced by the logarithm, a sixteenth of an octave each: a quantile is off by at most 4.5 % of itself.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

import numpy as np

from relax_core.api.batch import RowBatch


def count(rows: RowBatch) -> dict[str, float]:
    """Trained tokens, rows, samples and groups; pairs are groups of two samples."""
    members = Counter(group for group, _ in {(row.group, row.sample) for row in rows.ids})
    return {
        "tokens": float(rows.columns["loss_mask"].values.astype(bool).sum()),
        "rows": float(len(rows)),
        "samples": float(len({row.attempt_id for row in rows.ids})),
        "groups": float(len(members)),
        "pairs": float(sum(size == 2 for size in members.values())),
    }


def total(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Counts of several chunks of whole groups as those of one."""
    counts: dict[str, float] = {}
    for part in parts:
        for name, number in part.items():
            counts[name] = counts.get(name, 0.0) + number
    return counts


def nominal(counts: Mapping[str, float], share: float) -> dict[str, float]:
    """What the counts of a whole are guessed to be, from those of a share of it."""
    return {name: number / share for name, number in counts.items()}


def rows_with_gradient(rows: RowBatch) -> tuple[int, ...]:
    """Indices of rows in which some trained token has an advantage other than 0 (NaN is other than 0)."""
    column = rows.columns["advantages"]
    moved = (column.values != 0) & rows.columns["loss_mask"].values.astype(bool)
    row_of_token = np.repeat(np.arange(len(rows)), column.lengths)
    counts = np.bincount(row_of_token[moved], minlength=len(rows))
    return tuple(np.flatnonzero(counts).tolist())


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
        raise ValueError(_sentence(rows, step, max_staleness, int(np.argmax(wrong))))
    return int(lags.max())


def _sentence(rows: RowBatch, step: int, max_staleness: int, trained_token: int) -> str:
    mask = rows.columns["loss_mask"]
    token = int(np.flatnonzero(mask.values)[trained_token])
    row = int(np.searchsorted(mask.offsets(), token, side="right")) - 1
    version = int(rows.columns["weight_versions"].values[token])
    return (
        f"weight_versions of row {tuple(rows.ids[row])}: got version {version} in a step that starts at version {step}, "
        f"lag {step - version}; max_staleness = {max_staleness} allows 0 to {max_staleness}"
    )


PER_OCTAVE = 16
LEAST, MOST = -32, 8
"""Exponents of 2: what is below counts as 0, and what is above as the largest."""
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
