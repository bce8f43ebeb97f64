# SPDX-License-Identifier: Apache-2.0
"""Agreement of a reward's scores with labels, such as those of people. Pure functions without IO."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from statistics import StatisticsError, correlation, fmean


@dataclass(frozen=True, slots=True)
class Labelled:
    """One sample with a label."""

    task: str
    """Id of the sample's task; samples of one task are compared with each other."""
    label: float
    score: float | None
    """The reward's score; None: the sample could not be judged."""
    parts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Agreement:
    """Figures on the agreement of scores with labels. Samples without a score count in `failed` only. None: not defined."""

    samples: int
    failed: float
    """Share of samples that could not be judged."""
    accuracy: float | None
    """Share of samples whose score is nearer to their own label than to any other label of the set."""
    kappa: float | None
    """Cohen's kappa of labels and nearest labels of the scores (Cohen 1960): 0 by chance, 1 if all are equal."""
    spearman: float | None
    """Rank correlation of scores and labels; equal values share their mean rank."""
    pairs: float | None
    """Share of pairs of one task with different labels whose scores have the same order; equal scores count half."""
    parts: Mapping[str, float]
    """Mean of each part of the scores, over the samples that have the part."""


def agreement(samples: Sequence[Labelled]) -> Agreement:
    """Compare the scores of samples with their labels; labels are on the scale of the scores."""
    judged = [(sample.score, sample.label) for sample in samples if sample.score is not None]
    levels = sorted({sample.label for sample in samples})
    # The lower of two levels at the same distance counts.
    classes = [(min(levels, key=lambda level: abs(level - score)), label) for score, label in judged]
    parts: defaultdict[str, list[float]] = defaultdict(list)
    for sample in samples:
        for name, part in sample.parts.items():
            parts[name].append(part)
    return Agreement(
        len(samples),
        1 - len(judged) / len(samples) if samples else 0.0,
        fmean(nearest == label for nearest, label in classes) if classes else None,
        cohens_kappa(classes),
        spearman([score for score, _ in judged], [label for _, label in judged]),
        _ordered(samples),
        {name: fmean(values) for name, values in parts.items()},
    )


def cohens_kappa(classes: Sequence[tuple[float, float]]) -> float | None:
    """Return Cohen's kappa of pairs of classes; None without pairs, and if all pairs are the same class."""
    if not classes:
        return None
    observed = fmean(one == other for one, other in classes)
    ones, others = Counter(one for one, _ in classes), Counter(other for _, other in classes)
    chance = sum(count * others[level] for level, count in ones.items()) / len(classes) ** 2
    return (observed - chance) / (1 - chance) if chance < 1 else None


def spearman(scores: Sequence[float], labels: Sequence[float]) -> float | None:
    """Return the rank correlation of two lists; None if one has fewer than two different values."""
    try:
        return correlation(_ranks(scores), _ranks(labels))
    except StatisticsError:
        return None


def _ranks(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    return [(bisect_left(ordered, value) + bisect_right(ordered, value)) / 2 for value in values]


def _ordered(samples: Sequence[Labelled]) -> float | None:
    by_task: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for sample in samples:
        if sample.score is not None:
            by_task[sample.task].append((sample.score, sample.label))
    orders = [
        0.5 if first[0] == second[0] else float((first[0] < second[0]) == (first[1] < second[1]))
        for pairs in by_task.values()
        for first, second in combinations(pairs, 2)
        if first[1] != second[1]
    ]
    return fmean(orders) if orders else None
