# SPDX-License-Identifier: Apache-2.0
"""Sums and the counts that divide them: terms of a loss, denominators of an update, metrics, lags and quantiles.

No sum is divided early: a loss is divided by counts of the whole update, a metric when it is shown. If a count is known
only after the last chunk, chunks are divided by a nominal count, and the whole gradient is rescaled once. Importing the
module does not load torch.
"""

from __future__ import annotations

import math
import re
import traceback
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np

from relax_core.api.algorithm import Algorithm, Loss, LossBatch, Term
from relax_core.api.batch import Ragged, RowBatch
from relax_core.api.errors import PluginError, RelaxError

if TYPE_CHECKING:
    from torch import Tensor

# -- terms of a loss -------------------------------------------------------------------------------------------------

Aggregation = Literal["token", "sequence", "sum", "fixed", "trajectory"]
DENOMINATOR: dict[Aggregation, str] = {
    "token": "tokens", "sequence": "rows", "sum": "rows", "fixed": "rows", "trajectory": "samples",
}  # fmt: skip
"""The count of the whole update by which each aggregation divides. One count lets training overlap generation."""
MAX_LOG_RATIO = 20.0
"""Size to which log ratios are clipped before their exponential is taken."""


def aggregate(batch: LossBatch, values: Tensor, how: Aggregation, weight: float = 1.0, fixed_length: int = 1) -> Term:
    """Return the loss term of `values` [tokens] for an aggregation.

    `token`: mean over all tokens (DAPO). `sequence`: mean over each row's tokens, then over rows (GRPO). `sum`: sum
    over each row's tokens, then mean over rows (REINFORCE). `fixed`: as `sum`, divided by `fixed_length` tokens
    (Dr.GRPO's constant). `trajectory`: mean over the tokens of all rows of a sample, then over samples; bit for bit
    `sequence` if every sample has one row.
    """
    if how in ("sequence", "trajectory"):
        mean_of = batch.sequence_mean if how == "sequence" else batch.sample_mean
        return Term(mean_of(values), weight, DENOMINATOR[how], per="row")
    return Term(values, weight / fixed_length if how == "fixed" else weight, DENOMINATOR[how])


def reduce(loss: Loss, batch: LossBatch, denominators: Denominators) -> dict[str, Tensor]:
    """Reduce each term of this chunk to a scalar, `sum(value * weight over trained positions) / denominator`.

    The backward pass starts from the sum of the terms. Raises ValueError for a term of another shape, which torch would
    otherwise repeat for every position.
    """
    import torch  # not at the top: code that only plans updates imports this module without torch

    if not isinstance(loss, Loss):
        raise TypeError(f"the loss is {loss!r:.80} ({type(loss).__qualname__}); return a Loss")
    for name, metric in loss.metrics.items():
        if not isinstance(metric, tuple | list) or len(metric) != 2:
            raise TypeError(f"metric {name!r}: got {metric!r:.80}; give a pair of sum and count")
    denominators.add(loss.counts)
    reduced = {}
    for name, term in loss.terms.items():
        if not isinstance(term.value, torch.Tensor):
            raise ValueError(
                f"loss term {name!r}: got {term.value!r:.80} ({type(term.value).__qualname__}); want a Tensor"
            )
        if term.per == "pair":  # every pair counts
            if term.value.dim() != 1:
                raise ValueError(f"loss term {name!r}: got shape {tuple(term.value.shape)}; want one value per pair")
            summed = (term.value * term.weight).sum()
        else:
            trained = batch.loss_mask
            if term.per == "row":
                trained = batch.sequence_sum(batch.loss_mask.to(term.value.dtype)) > 0
            if term.value.shape != trained.shape:
                got, want = tuple(term.value.shape), tuple(trained.shape)
                raise ValueError(f"loss term {name!r}: got shape {got}; want {want}, one value per {term.per}")
            weight = term.weight
            if isinstance(weight, torch.Tensor) and weight.dim():
                weight = torch.where(trained, weight, 0.0)
            summed = torch.where(trained, term.value * weight, 0.0).sum()
        reduced[name] = summed / denominators.nominal(term.denominator)
    return reduced


@contextmanager
def charged_to(algorithm: Algorithm) -> Iterator[None]:
    """Raise PluginError, naming the algorithm, for an error of the body, which calls the algorithm.

    Errors of Relax and a lack of memory pass unchanged.
    """
    try:
        yield
    except RelaxError:
        raise
    except Exception as error:
        if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
            raise
        frames = "".join(traceback.format_exception(error)[1:])
        name = f"algorithm {type(algorithm).__qualname__}"
        raise PluginError(name, f"{type(error).__name__}: {error}", frames) from error


# -- denominators ----------------------------------------------------------------------------------------------------


class Denominators:
    """The counts of one update: nominal at its start, true at its end.

    Invariants:
    - a term is divided by the nominal count, which is 1 for a denominator that only the algorithm counts;
    - one gradient buffer can be rescaled once, so all denominators that terms used must share one factor.
    """

    def __init__(self, given: Mapping[str, float]) -> None:
        self._given = dict(given)
        self._own: dict[str, float] = {}
        self._used: set[str] = set()

    def nominal(self, name: str) -> float:
        """Return the nominal count of a denominator. Raises ValueError for an unknown denominator."""
        self._used.add(name)
        if name not in self._given and name not in self._own:
            raise ValueError(
                f"denominator {name!r}: unknown; use one of {', '.join(self._given)}, or count it in Loss.counts"
            )
        return self._given.get(name, 1.0) or 1.0

    def add(self, counts: Mapping[str, Tensor]) -> None:
        """Add a chunk's share of the algorithm's own denominators."""
        for name, share in counts.items():
            self._own[name] = self._own.get(name, 0.0) + float(share)

    def share(self) -> dict[str, Any]:
        """Return this rank's counts as plain data for `join`."""
        return {"own": self._own, "used": sorted(self._used)}

    def join(self, shares: Sequence[Mapping[str, Any]]) -> None:
        """Replace this rank's counts by the sums over all ranks, including this rank."""
        self._used = {name for share in shares for name in share["used"]}
        names = sorted({name for share in shares for name in share["own"]})
        self._own = {name: sum(share["own"].get(name, 0.0) for share in shares) for name in names}

    def rescale(self, true: Mapping[str, float]) -> float:
        """Return the factor from nominal to true counts. Raises ValueError if terms need different factors."""
        counts = {**self._given, **self._own, **true}
        factors = {name: self.nominal(name) / (counts[name] or 1.0) for name in sorted(self._used)}
        values = list(factors.values())
        if values and not all(math.isclose(value, values[0], rel_tol=1e-12) for value in values):
            raise ValueError(f"late denominators {factors}: got different factors; one gradient can be rescaled once")
        return values[0] if values else 1.0


def count(rows: RowBatch) -> dict[str, float]:
    """Count the trained tokens, rows, samples, groups and pairs of a claim, including rows without gradient.

    Pairs are groups of two samples.
    """
    members = Counter(group for group, _ in {row[:2] for row in rows.ids})
    return {
        "tokens": float(rows.columns["loss_mask"].values.astype(bool).sum()),
        "rows": float(len(rows)),
        "samples": float(len({row[:3] for row in rows.ids})),
        "groups": float(len(members)),
        "pairs": float(sum(size == 2 for size in members.values())),
    }


def sample_tokens(rows: RowBatch) -> Ragged:
    """Count the trained tokens of each row's whole sample, [rows]; the rows must be whole samples."""
    mask = rows.columns["loss_mask"]
    places: dict[tuple[int, ...], int] = {}
    sample = np.array([places.setdefault(row[:3], len(places)) for row in rows.ids], np.int64)
    counts = np.bincount(np.repeat(sample, mask.lengths)[mask.values.astype(bool)], minlength=len(places))
    return Ragged(counts[sample].astype(np.int32), np.ones(len(rows), np.int64))


def rows_with_gradient(rows: RowBatch) -> tuple[int, ...]:
    """Return the indices of rows with a trained token whose advantage is not 0; NaN is not 0."""
    column = rows.columns["advantages"]
    moved = (column.values != 0) & rows.columns["loss_mask"].values.astype(bool)
    row_of_token = np.repeat(np.arange(len(rows)), column.lengths)
    return tuple(np.flatnonzero(np.bincount(row_of_token[moved], minlength=len(rows))).tolist())


def check_lag(rows: RowBatch, step: int, max_staleness: int) -> int:
    """Return the largest lag: the version at the start of the training step minus the version that sampled a token.

    Raises ValueError naming the first row outside `0 <= lag <= max_staleness` or with a trained token that was not
    sampled (version -1); a `max_staleness` of -1 is unbounded.
    """
    mask, versions = rows.columns["loss_mask"], rows.columns["weight_versions"].values
    lags = step - versions[mask.values.astype(bool)].astype(np.int64)
    if not len(lags):
        return 0
    bound = max_staleness if max_staleness >= 0 else int(lags.max())
    wrong = (lags < 0) | (lags > min(bound, step))
    if wrong.any():
        token = int(np.flatnonzero(mask.values)[np.argmax(wrong)])
        row = int(np.searchsorted(mask.offsets(), token, side="right")) - 1
        version = int(versions[token])
        if version < 0:
            raise ValueError(
                f"loss_mask of row {tuple(rows.ids[row])}: token {token - int(mask.offsets()[row])} is trained, but the policy "
                "did not sample it; check for code that moves the mask or the tokens by a position"
            )
        raise ValueError(
            f"weight_versions of row {tuple(rows.ids[row])}: got version {version} in a step that starts at version {step}, "
            f"lag {step - version}; max_staleness = {max_staleness} allows 0 to {max_staleness}"
        )
    return int(lags.max())


# -- metrics ---------------------------------------------------------------------------------------------------------

Metric = tuple[float, float]
"""(sum, count), both added over chunks, ranks and updates before the division. Metrics named `..._max` and `..._min`
keep the extreme of the first value, with count 1.
"""
NumberT = TypeVar("NumberT", float, "Tensor")


def merge_metrics(*parts: Mapping[str, tuple[NumberT, NumberT]]) -> dict[str, tuple[NumberT, NumberT]]:
    """Add the metrics of several parts by name; values are numbers or scalar tensors."""
    merged: dict[str, tuple[NumberT, NumberT]] = {}
    for part in parts:
        for name, other in part.items():
            one = merged.get(name, other)
            if name not in merged or not one[1]:
                merged[name] = other
            elif not other[1]:
                continue
            elif name.endswith("_max"):
                merged[name] = max(one[0], other[0]), one[1]
            elif name.endswith("_min"):
                merged[name] = min(one[0], other[0]), one[1]
            else:
                merged[name] = one[0] + other[0], one[1] + other[1]
    return merged


def measured(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Return the numbers that are shown. A metric with the count 0 was not measured, so it is left out."""
    return {name: mean(metric) for name, metric in metrics.items() if metric[1]}


def mean(metric: Metric) -> float:
    """Return the number that is shown: sum / count, or 0 if the count is 0."""
    return metric[0] / metric[1] if metric[1] else 0.0


# Quantiles are kept as counts in fixed buckets, as metrics `NAME_p99@BUCKET`, which add up for any split into batches.

PER_OCTAVE = 16
MIN_OCTAVE, MAX_OCTAVE = -32, 8
"""Exponents of 2 of the least and the largest size in buckets. Quantiles are off by at most 4.5 % between these sizes;
smaller sizes count as 0, larger sizes as the largest.
"""
BUCKETS = (MAX_OCTAVE - MIN_OCTAVE) * PER_OCTAVE + 1
_KEY = re.compile(r"(?P<name>.+_p(?P<percent>\d\d))@(?P<bucket>\d+)")


def with_quantiles(metrics: Mapping[str, Metric]) -> dict[str, Metric]:
    """Replace each quantile's bucket counts by the quantile's value, which never exceeds the metric's `..._max`."""
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
    """Return the size at or below which this share of all sizes lies, interpolated by rank within its bucket."""
    total = sum(counts.values())
    rank = total - 1 - int(total * (1 - share) + 1e-9)
    before = 0.0
    for bucket, number in sorted(counts.items()):
        if before + number > rank:
            inside = (rank - before + 0.5) / number
            return 2.0 ** (MIN_OCTAVE + (bucket - 1 + inside) / PER_OCTAVE) if bucket else 0.0
        before += number
    return 0.0
