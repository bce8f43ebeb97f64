# SPDX-License-Identifier: Apache-2.0
"""Ragged numpy columns as they travel: flat values and row lengths. Torch stays at the trainer's edge."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from relax_core.api.errors import RelaxError

if TYPE_CHECKING:
    import numpy as np


class AttemptId(NamedTuple):
    """One sample: the n-th attempt at one place of a group. `group` is the monotonic issue number."""

    group: int
    sample: int
    attempt: int


class AttemptIds(tuple[AttemptId, ...]):
    """Samples as they travel between processes: pickled as one array of numbers, not as so many objects."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return AttemptIds._of, (array("q", chain.from_iterable(self)).tobytes(),)

    @classmethod
    def _of(cls, packed: bytes) -> AttemptIds:
        numbers = iter(memoryview(packed).cast("q"))
        return cls(map(AttemptId, numbers, numbers, numbers))


class RowId(NamedTuple):
    """One training sequence of a sample."""

    group: int
    sample: int
    attempt: int
    row: int

    @property
    def attempt_id(self) -> AttemptId:
        return AttemptId(self.group, self.sample, self.attempt)


class RowIds(tuple[RowId, ...]):
    """Rows as they travel, like `AttemptIds`."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return RowIds._of, (array("q", chain.from_iterable(self)).tobytes(),)

    @classmethod
    def _of(cls, packed: bytes) -> RowIds:
        numbers = iter(memoryview(packed).cast("q"))
        return cls(map(RowId, numbers, numbers, numbers, numbers))


@dataclass(frozen=True, slots=True)
class Cut:
    """A part of every row: its tokens from start to stop, and these layers (the first axis after the tokens)."""

    tokens: tuple[int, int] | None = None
    """A row that is shorter gives what it has; None: all."""
    layers: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Ragged:
    """One column of several rows: `values` [sum(lengths), *shape] and `lengths` [rows]; a row column has lengths 1."""

    values: np.ndarray
    lengths: np.ndarray

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def size_bytes(self) -> int:
        return int(self.values.nbytes)

    def offsets(self) -> np.ndarray:
        """[rows + 1] starts of each row in `values`."""
        import numpy as np

        return np.concatenate(([0], np.cumsum(self.lengths)))

    def rows(self) -> Iterator[np.ndarray]:
        starts = self.offsets()
        return (self.values[starts[i] : starts[i + 1]] for i in range(len(self)))

    def take(self, indices: Sequence[int]) -> Ragged:
        """Rows in the order of `indices`."""
        import numpy as np

        chosen = np.asarray(indices, dtype=np.int64)
        lengths = np.asarray(self.lengths)[chosen]
        shift = self.offsets()[:-1][chosen] - (np.cumsum(lengths) - lengths)
        return Ragged(self.values[np.repeat(shift, lengths) + np.arange(lengths.sum())], lengths)

    def cut(self, part: Cut) -> Ragged:
        """The part of every row; a view where layers alone are cut."""
        values = self.values
        if part.layers is not None:
            if values.ndim < 2:
                raise RelaxError(
                    f"bus: slice: got layers of a column of shape {list(values.shape)}; it has none, leave them out"
                )
            values = values[:, slice(*part.layers)]
        return (
            Ragged(values, self.lengths) if part.tokens is None else Ragged(values, self.lengths)._tokens(*part.tokens)
        )

    def _tokens(self, start: int, stop: int) -> Ragged:
        import numpy as np

        known = np.asarray(self.lengths)
        first = np.minimum(max(0, start), known)
        lengths = np.maximum(np.minimum(max(0, stop), known) - first, 0)
        shift = self.offsets()[:-1] + first - (np.cumsum(lengths) - lengths)
        return Ragged(self.values[np.repeat(shift, lengths) + np.arange(lengths.sum())], lengths)

    @staticmethod
    def of(rows: Sequence[np.ndarray], like: np.ndarray | None = None) -> Ragged:
        """From one array a row; `like` gives dtype and shape where there is none."""
        import numpy as np

        lengths = np.array([len(r) for r in rows], dtype=np.int64)
        if rows:
            return Ragged(np.concatenate(rows), lengths)
        return Ragged(np.zeros((0,), np.float32) if like is None else like[:0], lengths)

    @staticmethod
    def concatenate(parts: Sequence[Ragged]) -> Ragged:
        import numpy as np

        return Ragged(np.concatenate([p.values for p in parts]), np.concatenate([p.lengths for p in parts]))


@dataclass(frozen=True, slots=True)
class RowBatch:
    """Rows with columns; every column has `len(ids)` rows in the order of `ids`."""

    ids: tuple[RowId, ...]
    columns: Mapping[str, Ragged]

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def size_bytes(self) -> int:
        return sum(column.size_bytes for column in self.columns.values())

    def take(self, indices: Sequence[int]) -> RowBatch:
        return RowBatch(tuple(self.ids[i] for i in indices), {n: c.take(indices) for n, c in self.columns.items()})

    def with_columns(self, columns: Mapping[str, Ragged]) -> RowBatch:
        return RowBatch(self.ids, {**self.columns, **columns})
