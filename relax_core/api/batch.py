# SPDX-License-Identifier: Apache-2.0
"""Rows as ragged numpy columns (flat values plus row lengths), and the standard columns of the bus.

Only trainers convert columns to torch tensors. The constants define the documented column names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    import numpy as np


class AttemptId(NamedTuple):
    """The id of an attempt: sample `sample` of group `group`; `attempt` counts earlier issues of the group."""

    group: int
    sample: int
    attempt: int


class RowId(NamedTuple):
    """The id of a row: training sequence number `row` of an attempt.

    `row_id[:3]` equals `attempt_id` and has its hash, and is made much faster.
    """

    group: int
    sample: int
    attempt: int
    row: int

    @property
    def attempt_id(self) -> AttemptId:
        return AttemptId(self.group, self.sample, self.attempt)


@dataclass(frozen=True, slots=True)
class Ragged:
    """One column of several rows: `values` [sum(lengths), *shape], `lengths` [rows]; a row column has lengths 1."""

    values: np.ndarray
    lengths: np.ndarray

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def size_bytes(self) -> int:
        return int(self.values.nbytes)

    def offsets(self) -> np.ndarray:
        """Return the start of each row in `values`, and the end of the last row: [rows + 1]."""
        import numpy as np

        return np.concatenate(([0], np.cumsum(self.lengths)))

    def rows(self) -> Iterator[np.ndarray]:
        starts = self.offsets()
        return (self.values[starts[i] : starts[i + 1]] for i in range(len(self)))

    def take(self, indices: Sequence[int]) -> Ragged:
        """Return the rows at `indices`, in that order."""
        import numpy as np

        chosen = np.asarray(indices, dtype=np.int64)
        lengths = np.asarray(self.lengths)[chosen]
        shift = self.offsets()[:-1][chosen] - (np.cumsum(lengths) - lengths)
        return Ragged(self.values[np.repeat(shift, lengths) + np.arange(lengths.sum())], lengths)

    @staticmethod
    def of(rows: Sequence[np.ndarray], like: np.ndarray | None = None) -> Ragged:
        """Join arrays, one for each row, into a column; if `rows` is empty, `like` sets dtype and shape."""
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
    """Rows with their columns; each column has `len(ids)` rows in the order of `ids`."""

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
    """The type of a column. For each row, a token column holds [tokens, *shape] and a row column [*shape]."""

    name: str
    dtype: Dtype = "float32"
    """`bfloat16` values are stored as their bits in uint16; `object` is a msgpack value."""
    per: Per = "token"
    shape: tuple[int, ...] = ()


TOKENS = Column("tokens", "int32")
LOSS_MASK = Column("loss_mask", "uint8")
"""1: this row trains the token. In a rollout, only tokens that the policy sampled can be 1."""
ROLLOUT_LOG_PROBS = Column("rollout_log_probs")
"""Log-prob that the engine reported when it sampled the token; 0 for given tokens."""
OLD_LOG_PROBS = Column("old_log_probs")
"""Log-prob under the policy at the start of the step that trains the row."""
REF_LOG_PROBS = Column("ref_log_probs")
TEACHER_LOG_PROBS = Column("teacher_log_probs")
VALUES = Column("values")
RETURNS = Column("returns")
ADVANTAGES = Column("advantages")
WEIGHT_VERSIONS = Column("weight_versions", "int32")
"""Step of the weights that sampled the token; -1 for given tokens."""
REWARDS = Column("rewards", per="row")
TURNS = Column("turns", "int32")
"""Turn of the sample that sampled the token, from 0 in the order in which turns began; -1 for given tokens."""
STATES = Column("states", "int64")
"""Key of the state before the token's turn; turns with equal keys began in equal states. 0 for given tokens."""
CONTEXTS = Column("contexts", "int64")
"""Key of the turn's context (`context_key` of its name); 0 for contexts without a name and for given tokens."""
STEP_REWARDS = Column("step_rewards")
"""Reward of the token's turn; the rewards of a sample's turns add up to the sample's reward. 0 for given tokens."""
SAMPLE_TOKENS = Column("sample_tokens", "int32", per="row")
"""Number of trained tokens in all rows of the row's sample; in the rows of a step if a sample has several rows."""
MARGINS = Column("margins", per="row")
"""Margin by which the chosen row of a pair should score above the rejected row."""
OUTCOME = Column("outcome", "uint8", per="row")
MEDIA = Column("media", "uint8", per="row", shape=(16,))
"""Keys of a row's media in the order of placeholders: [media of the row, 16]; the media store has the tensors."""


def routed_experts(layers: int, top_k: int, wide: bool = False) -> Column:
    """Return the column of experts that each token visited in each layer: [tokens, layers, top_k]; `wide`: uint16."""
    return Column("routed_experts", "uint16" if wide else "uint8", shape=(layers, top_k))


def student_top_k_ids(k: int) -> Column:
    """Return the column of the policy's k most likely tokens at, or shortly after, sampling: [tokens, k]."""
    return Column("student_top_k_ids", "int32", shape=(k,))


def teacher_top_k(k: int) -> tuple[Column, Column]:
    """Return the columns of the teacher's k most likely tokens and their log-probs: [tokens, k] each."""
    return (
        Column("teacher_top_k_ids", "int32", shape=(k,)),
        Column("teacher_top_k_log_probs", shape=(k,)),
    )


def teacher_log_probs_at(k: int) -> Column:
    """Return the column of the teacher's log-probs of `student_top_k_ids`: [tokens, k]."""
    return Column("teacher_log_probs_at", shape=(k,))


TEACHER_INDEX = Column("teacher_index", "int32", per="row")
"""Index, in the configuration's list of teachers, of the teacher for this row."""
ALGORITHM_INDEX = Column("algorithm_index", "int32", per="row")
"""Index in `RunConfig.algorithms` of the algorithm that learns from this row."""
ROUTED_VALID = Column("routed_valid", "uint8")
"""1: `routed_experts` holds the token's experts; 0: unknown, so the trainer computes the routing itself."""

STANDARD: dict[str, Column] = {
    c.name: c
    for c in (
        TOKENS, LOSS_MASK, ROLLOUT_LOG_PROBS, OLD_LOG_PROBS, REF_LOG_PROBS, TEACHER_LOG_PROBS, VALUES, RETURNS,
        ADVANTAGES, WEIGHT_VERSIONS, REWARDS, TURNS, STATES, CONTEXTS, STEP_REWARDS, OUTCOME, ROUTED_VALID, MEDIA,
    )
}  # fmt: skip
