# SPDX-License-Identifier: Apache-2.0
"""Columns of the bus: name, dtype, what one value belongs to, trailing shape. DESIGN's field names are the constants here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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
        ADVANTAGES, WEIGHT_VERSIONS, REWARDS, TURNS, STATES, STEP_REWARDS, OUTCOME, ROUTED_VALID, MEDIA,
    )
}  # fmt: skip
