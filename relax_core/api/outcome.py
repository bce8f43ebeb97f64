# SPDX-License-Identifier: Apache-2.0
"""How an attempt ended. Only a judged one has a reward; an infrastructure failure is an outcome, never a zero."""

from __future__ import annotations

from enum import StrEnum


class Outcome(StrEnum):
    """Written into the `outcome` column and counted in the ledger."""

    FINISHED = "finished"
    """The policy ended its turn or the environment was done."""
    TRUNCATED = "truncated"
    """A token or turn limit cut it; still judged."""
    REWARD_ERROR = "reward_error"
    REWARD_TIMEOUT = "reward_timeout"
    REWARD_INVALID = "reward_invalid"
    """NaN, infinite or not a number."""
    ENVIRONMENT_ERROR = "environment_error"
    ENVIRONMENT_TIMEOUT = "environment_timeout"
    ENGINE_ERROR = "engine_error"
    """The policy's engines, or those that a reward asked, could not answer."""
    ENGINE_TIMEOUT = "engine_timeout"
    """A turn was not sampled within `rollout.turn_timeout_s`, or an engine that a reward asked did not answer in time."""
    MEDIA_ERROR = "media_error"
    INVALID_TASK = "invalid_task"

    @property
    def judged(self) -> bool:
        return self._value_ in ("finished", "truncated")  # by text: it is asked of every sample again and again


class DropReason(StrEnum):
    """Why an issued attempt will never be trained."""

    EXPIRED = "expired"
    DEADLINE = "deadline"
    FAILED = "failed"
    """Its outcome was not judged."""
    TOO_FEW_VALID = "too_few_valid"
    FILTERED = "filtered"
    SPARE = "spare"
    REGENERATED = "regenerated"
    ABANDONED = "abandoned"
    """Trained only in a lineage of weights that a rollback gave up."""
    RESUMED = "resumed"
    """In flight when the run stopped; issued again on resume."""
    STOPPED = "stopped"
