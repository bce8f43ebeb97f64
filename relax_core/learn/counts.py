# SPDX-License-Identifier: Apache-2.0
"""The denominators of an update, counted from the claim: every row of it, those without gradient included. No torch."""

from __future__ import annotations

from relax_core.api.batch import RowBatch


def count(rows: RowBatch) -> dict[str, float]:
    """Trained tokens, rows, samples and groups."""
    return {
        "tokens": float(rows.columns["loss_mask"].values.astype(bool).sum()),
        "rows": float(len(rows)),
        "samples": float(len({row.attempt_id for row in rows.ids})),
        "groups": float(len({row.group for row in rows.ids})),
    }
