# SPDX-License-Identifier: Apache-2.0
"""A teacher behind an engine pool: the log-probs of the rows' own tokens, of logits / `rollout.temperature`.

It gives nothing else: the planner refuses an algorithm that asks engines for likeliest tokens.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

import numpy as np

from relax_core.api.batch import Ragged, RowBatch
from relax_core.api.events import RoleFailed, RoleRecovered
from relax_core.api.role import Context
from relax_core.rollout.pool_hand import PoolHand


class Tutor(Protocol):
    """What a teacher is asked through."""

    async def forward(self, rows: RowBatch, columns: Sequence[str]) -> Mapping[str, Ragged]: ...


class PoolTutor:
    """Scores rows with the engines of a pool."""

    def __init__(self, context: Context, hand: PoolHand) -> None:
        self._hand, self._temperature = hand, float(context.run.rollout.temperature)

    async def forward(self, rows: RowBatch, columns: Sequence[str]) -> dict[str, Ragged]:
        """`log_probs`, in the order of the rows."""
        tokens = rows.columns["tokens"]
        scores = await self._hand.score_rows([row.tolist() for row in tokens.rows()], self._temperature)
        values = np.concatenate([np.asarray(one, np.float32) for one in scores])
        return {"log_probs": Ragged(values, tokens.lengths)}


def context_tells(context: Context) -> Callable[[str, str, float], Awaitable[None]]:
    """Engines that failed and came back, told to the board."""

    async def tell(what: str, detail: str, seconds: float) -> None:
        if what == "failed":
            await context.board.emit(RoleFailed("engine", detail, 4, fatal=False))
        else:
            await context.board.emit(RoleRecovered("engine", seconds, detail))

    return tell
