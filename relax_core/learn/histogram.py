# SPDX-License-Identifier: Apache-2.0
"""Quantiles of sizes as (sum, count) metrics: counts in buckets that are the same everywhere, so that they add up exactly over
micro-batches, ranks and updates however those are cut. No torch.

Buckets are spaced by the logarithm, a sixteenth of an octave each: a quantile is off by at most 4.5 % of itself.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping

from relax_core.learn.metrics import Metric

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
