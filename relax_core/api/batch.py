# SPDX-License-Identifier: Apache-2.0
"""Ragged numpy columns as they travel, flat values and row lengths, and the typed columns of the bus.

Torch stays at the trainer's edge. The constants are the documented field names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from relax_core.api.errors import RelaxError

if TYPE_CHECKING:
    import numpy as np


class AttemptId(NamedTuple):
    """One sample: the n-th attempt at one place of a group. `group` is the monotonic issue number."""

    group: int
    sample: int
    attempt: int


class RowId(NamedTuple):
    """One training sequence of a sample."""

    group: int
    sample: int
    attempt: int
    row: int

    @property
    def attempt_id(self) -> AttemptId:
        return AttemptId(self.group, self.sample, self.attempt)


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
        return self._gathered(self.offsets()[:-1][chosen], np.asarray(self.lengths)[chosen])

    def cut(self, part: Cut) -> Ragged:
        """The part of every row; a view where layers alone are cut."""
        import numpy as np

        values = self.values
        if part.layers is not None:
            if values.ndim < 2:
                shape = list(values.shape)
                raise RelaxError(f"bus: slice: got layers of a column of shape {shape}; it has none, leave them out")
            values = values[:, slice(*part.layers)]
        if part.tokens is None:
            return Ragged(values, self.lengths)
        known, (start, stop) = np.asarray(self.lengths), part.tokens
        first = np.minimum(max(0, start), known)
        lengths = np.maximum(np.minimum(max(0, stop), known) - first, 0)
        return Ragged(values, self.lengths)._gathered(self.offsets()[:-1] + first, lengths)

    def _gathered(self, starts: np.ndarray, lengths: np.ndarray) -> Ragged:
        """Copy a stretch of values for each row."""
        import numpy as np

        shift = starts - (np.cumsum(lengths) - lengths)
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


Per = Literal["token", "row"]
Dtype = Literal["int32", "int64", "float32", "float64", "bfloat16", "uint8", "uint16", "object"]


@dataclass(frozen=True, slots=True)
class Column:
    """A typed column. A token column holds [tokens, *shape] a row, a row column [*shape]."""

    name: str
    dtype: Dtype = "float32"
    """`bfloat16` travels as its bits in uint16; `object` is a msgpack value."""
    per: Per = "token"
    shape: tuple[int, ...] = ()
    by_reference: bool = False
    """Large: kept in the payload store and read by token or layer slice."""


TOKENS = Column("tokens", "int32")
LOSS_MASK = Column("loss_mask", "uint8")
"""1 = the policy's own token, trained in this row."""
ROLLOUT_LOG_PROBS = Column("rollout_log_probs")
OLD_LOG_PROBS = Column("old_log_probs")
"""The policy at the start of the step that trains the row."""
REF_LOG_PROBS = Column("ref_log_probs")
TEACHER_LOG_PROBS = Column("teacher_log_probs")
VALUES = Column("values")
RETURNS = Column("returns")
ADVANTAGES = Column("advantages")
WEIGHT_VERSIONS = Column("weight_versions", "int32")
"""Step of the weights that sampled the token; -1 for given tokens."""
REWARDS = Column("rewards", per="row")
TURNS = Column("turns", "int32")
"""Turn of its sample that sampled the token, counted from 0 in the order in which turns began; -1 for given tokens."""
STATES = Column("states", "int64")
"""Key of what the policy was shown before that turn: equal keys, equal states. 0 for given tokens."""
CONTEXTS = Column("contexts", "int64")
"""Key of the context in which that turn was taken (`context_key` of its name). 0 for given tokens, and in no named context."""
STEP_REWARDS = Column("step_rewards")
"""What that turn earned: a sample's turns together earned its reward. 0 for given tokens."""
MARGINS = Column("margins", per="row")
"""Of a pair's rows: by how much the chosen one should be ahead."""
OUTCOME = Column("outcome", "uint8", per="row")
MEDIA = Column("media", "uint8", per="row", shape=(16,))
"""Keys of a row's media in the order of their placeholders: [media of the row, 16]. Their tensors are in the media store."""


def routed_experts(layers: int, top_k: int, wide: bool = False) -> Column:
    """Expert choices of every token and layer, by reference: [tokens, layers, top_k]."""
    return Column("routed_experts", "uint16" if wide else "uint8", shape=(layers, top_k), by_reference=True)


def student_top_k_ids(k: int) -> Column:
    """The likeliest tokens at every trained position under the policy, about when the row was sampled: [tokens, k]."""
    return Column("student_top_k_ids", "int32", shape=(k,))


def teacher_top_k(k: int) -> tuple[Column, Column]:
    """The likeliest tokens under the teacher, and their log-probs: [tokens, k] each."""
    return (
        Column("teacher_top_k_ids", "int32", shape=(k,)),
        Column("teacher_top_k_log_probs", shape=(k,)),
    )


def teacher_log_probs_at(k: int) -> Column:
    """The teacher's log-probs of `student_top_k_ids`: [tokens, k]."""
    return Column("teacher_log_probs_at", shape=(k,))


TEACHER_INDEX = Column("teacher_index", "int32", per="row")
"""Which of the run's teachers teaches the row, by its place in the configuration."""
ALGORITHM_INDEX = Column("algorithm_index", "int32", per="row")
"""Which of the run's algorithms learns from the row, by its place in `RunConfig.algorithms`."""
ROUTED_VALID = Column("routed_valid", "uint8")
"""1 where `routed_experts` are known: elsewhere the trainer routes for itself."""

STANDARD: dict[str, Column] = {
    c.name: c
    for c in (
        TOKENS, LOSS_MASK, ROLLOUT_LOG_PROBS, OLD_LOG_PROBS, REF_LOG_PROBS, TEACHER_LOG_PROBS, VALUES, RETURNS,
        ADVANTAGES, WEIGHT_VERSIONS, REWARDS, TURNS, STATES, CONTEXTS, STEP_REWARDS, OUTCOME, ROUTED_VALID, MEDIA,
    )
}  # fmt: skip
