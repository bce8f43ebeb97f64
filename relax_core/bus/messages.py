# SPDX-License-Identifier: Apache-2.0
"""Arguments of bus calls on their way between processes: seals encoded by columns, and checks that both ends make.

A seal in a process of its own is some ten objects; as one array a field, thousands of them cost little.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from itertools import chain
from operator import attrgetter
from typing import Any, cast

from relax_core.api.batch import AttemptId, Cut, Ragged, RowId
from relax_core.api.bus import Claim, Sealed
from relax_core.api.errors import RelaxError
from relax_core.rpc import messages


def check_seals(ids: Iterable[RowId], sealed: Sequence[Sealed]) -> None:
    """Raise unless every sample of a put comes whole: with one seal, and as many rows as it says."""
    rows = Counter(row.attempt_id for row in set(ids))
    counts = {seal.attempt: seal.num_rows for seal in sealed}
    for attempt in rows.keys() | counts.keys():
        if counts.get(attempt) != rows[attempt]:
            raise RelaxError(
                f"bus: put of {tuple(attempt)}: got {rows[attempt]} rows, sealed with {counts.get(attempt)}; "
                "put a sample's rows together with its seal"
            )


def check_columns(claim: Claim, columns: Mapping[str, Ragged]) -> None:
    """Raise unless a write fills its columns for every claimed row."""
    for name, column in columns.items():
        if len(column) != len(claim.rows):
            raise RelaxError(f"bus: write of {name}: got {len(column)} rows for a claim of {len(claim.rows)}; give all")


def check_cut(part: Cut) -> None:
    """Raise unless both ends of a span are counted from the front."""
    for name, span in (("tokens", part.tokens), ("layers", part.layers)):
        if span is not None and not 0 <= span[0] <= span[1]:
            raise RelaxError(
                f"bus: read_slice of {name}: got {list(span)}; give a start of 0 or more and a stop after it"
            )


Column = tuple[str, Any]
"""One field of many seals: the kind of its values, and these as the bytes of one array where they are numbers."""
_VALUES = attrgetter(*(field.name for field in fields(Sealed)))


@messages.register
class Seals(tuple[Sealed, ...]):
    """Seals of a put: a tuple that travels by columns."""

    __slots__ = ()

    def pack(self) -> tuple[Column, ...]:
        return _pack(self)

    @classmethod
    def unpack(cls, columns: tuple[Column, ...]) -> Seals:
        return cls(_unpack(columns))


@messages.register
class Samples(dict[AttemptId, Sealed]):
    """Samples of a claim: a dict by attempt that travels by columns."""

    @classmethod
    def of(cls, seals: Iterable[Sealed]) -> Samples:
        return cls({seal.attempt: seal for seal in seals})

    def pack(self) -> tuple[Column, ...]:
        return _pack(self.values())

    @classmethod
    def unpack(cls, columns: tuple[Column, ...]) -> Samples:
        return cls.of(_unpack(columns))


def _pack(seals: Iterable[Sealed]) -> tuple[Column, ...]:
    return tuple(_pack_column(values) for values in zip(*map(_VALUES, seals), strict=True))


def _unpack(columns: tuple[Column, ...]) -> Iterable[Sealed]:
    return map(Sealed, *map(_unpack_column, columns)) if columns else ()


def _pack_column(values: tuple[Any, ...]) -> Column:
    kinds = set(map(type, values))
    if kinds == {int}:
        return "q", array("q", values).tobytes()
    if kinds == {float}:
        return "d", array("d", values).tobytes()
    if kinds == {AttemptId}:
        return "attempts", array("q", chain.from_iterable(values)).tobytes()
    return "", values


def _unpack_column(column: Column) -> Iterable[Any]:
    kind, values = column
    if kind == "attempts":
        numbers = iter(memoryview(values).cast("q"))
        return map(AttemptId, numbers, numbers, numbers)
    if not kind:
        return cast(Iterable[Any], values)
    return memoryview(values).cast("q" if kind == "q" else "d")
