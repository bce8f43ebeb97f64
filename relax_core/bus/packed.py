# SPDX-License-Identifier: Apache-2.0
"""Samples as they travel between processes: pickled by columns, not as so many objects. `api.batch.RowIds` of a seal.

They are what they hold in every other way: a tuple of seals, a dict of them by attempt.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import fields
from itertools import chain
from operator import attrgetter
from typing import Any, cast

from relax_core.api.batch import AttemptId
from relax_core.api.bus import Sealed

NAMES = tuple(field.name for field in fields(Sealed))
_VALUES = attrgetter(*NAMES)
Column = tuple[str, Any]


class Seals(tuple[Sealed, ...]):
    """Of a put."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return Seals._of, (pack(self),)

    @classmethod
    def _of(cls, packed: tuple[Column, ...]) -> Seals:
        return cls(unpack(packed))


class Samples(dict[AttemptId, Sealed]):
    """Of a claim."""

    @classmethod
    def of(cls, seals: Iterable[Sealed]) -> Samples:
        return cls({seal.attempt: seal for seal in seals})

    def __reduce__(self) -> tuple[Any, ...]:
        return Samples._of, (pack(self.values()),)

    @classmethod
    def _of(cls, packed: tuple[Column, ...]) -> Samples:
        return cls.of(unpack(packed))


def pack(seals: Iterable[Sealed]) -> tuple[Column, ...]:
    """A column for each field."""
    return tuple(_packed(values) for values in zip(*map(_VALUES, seals), strict=True))


def unpack(columns: tuple[Column, ...]) -> Iterable[Sealed]:
    return map(Sealed, *map(_unpacked, columns)) if columns else ()


def _packed(values: tuple[Any, ...]) -> Column:
    """Numbers as one array, all else as it is."""
    kinds = set(map(type, values))
    if kinds == {int}:
        return "q", array("q", values).tobytes()
    if kinds == {float}:
        return "d", array("d", values).tobytes()
    if kinds == {AttemptId}:
        return "attempts", array("q", chain.from_iterable(values)).tobytes()
    return "", values


def _unpacked(column: Column) -> Iterable[Any]:
    kind, values = column
    if kind == "attempts":
        numbers = iter(memoryview(values).cast("q"))
        return map(AttemptId, numbers, numbers, numbers)
    if not kind:
        return cast(Iterable[Any], values)
    return memoryview(values).cast("q" if kind == "q" else "d")
