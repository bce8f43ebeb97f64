# SPDX-License-Identifier: Apache-2.0
"""The denominators of an update, counted from the claim: every row of it, those without gradient included. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

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
