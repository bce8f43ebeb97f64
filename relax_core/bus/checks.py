# SPDX-License-Identifier: Apache-2.0
"""What a bus refuses before it changes anything: settings that can't work, and samples that do not come whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from relax_core.api.batch import Cut, Ragged, RowId
from relax_core.api.bus import BusSettings, Claim, Sealed
from relax_core.api.errors import ConfigError, RelaxError


def check_settings(settings: BusSettings) -> None:
    for name in ("group_size", "groups_per_step", "max_rows", "max_bytes"):
        if getattr(settings, name) < 1:
            raise ConfigError(f"bus.{name}", getattr(settings, name), "give at least 1")
    if settings.max_staleness is not None and settings.max_staleness < 0:
        raise ConfigError("max_staleness", settings.max_staleness, "give 0 or more, or ask for `unbounded` by name")
    if settings.min_valid > settings.group_size:
        raise ConfigError("min_valid", settings.min_valid, f"a group has only {settings.group_size} samples")


def check_seals(ids: Iterable[RowId], sealed: Sequence[Sealed]) -> None:
    """Every sample comes whole: as many rows as its seal says, one seal a sample."""
    rows = Counter(row.attempt_id for row in set(ids))
    counts = {seal.attempt: seal.num_rows for seal in sealed}
    for attempt in rows.keys() | counts.keys():
        if counts.get(attempt) != rows[attempt]:
            raise RelaxError(
                f"bus: put of {tuple(attempt)}: got {rows[attempt]} rows, sealed with {counts.get(attempt)}; "
                "put a sample's rows together with its seal"
            )


def check_columns(claim: Claim, columns: Mapping[str, Ragged]) -> None:
    """A write fills its columns for every claimed row."""
    for name, column in columns.items():
        if len(column) != len(claim.rows):
            raise RelaxError(f"bus: write of {name}: got {len(column)} rows for a claim of {len(claim.rows)}; give all")


def check_cut(part: Cut) -> None:
    """Both ends of a span are counted from the front."""
    for name, span in (("tokens", part.tokens), ("layers", part.layers)):
        if span is not None and not 0 <= span[0] <= span[1]:
            raise RelaxError(
                f"bus: read_slice of {name}: got {list(span)}; give a start of 0 or more and a stop after it"
            )
