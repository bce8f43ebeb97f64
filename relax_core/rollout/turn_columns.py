# SPDX-License-Identifier: Apache-2.0
"""Columns for the credit of turns: which turn of its sample a token is of, the state that it began in, what it earned.

What no turn was credited with (rewards that judge a whole sample) is earned by the last one, so that the turns of a
sample together earn its reward.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import TYPE_CHECKING

from relax_core.api.batch import Ragged
from relax_core.api.column import STATES, STEP_REWARDS, TURNS
from relax_core.api.trajectory import Path, Trajectory
from relax_core.rollout.judge import Judgement

if TYPE_CHECKING:
    import numpy as np

TURN_COLUMNS = frozenset({TURNS.name, STATES.name, STEP_REWARDS.name})
GIVEN = (-1, 0, 0.0)
"""Turn, state and reward of tokens that nobody sampled."""


def turn_columns(
    samples: Sequence[tuple[tuple[Path, ...], Trajectory, Judgement]], lengths: np.ndarray
) -> dict[str, Ragged]:
    """All of them, for the rows of these samples, in order; `lengths` are the rows' tokens."""
    import numpy as np

    told: list[tuple[int, int, float]] = []
    widths: list[int] = []
    for paths, trajectory, judgement in samples:
        earned = _earned(trajectory, judgement) if paths else {}
        for node in (node for path in paths for node, _ in path):
            widths.append(len(node.tokens))
            known = node.turn in earned
            told.append((node.turn, trajectory.states[node.turn], earned[node.turn]) if known else GIVEN)
    columns = zip(*told, strict=True) if told else ((), (), ())
    return {
        column.name: Ragged(np.repeat(np.array(values, column.dtype), widths), lengths)
        for column, values in zip((TURNS, STATES, STEP_REWARDS), columns, strict=True)
    }


def _earned(trajectory: Trajectory, judgement: Judgement) -> dict[int, float]:
    """By turn. A turn of no tokens has no place in a row: what it earned is the one's before it."""
    turns = sorted({node.turn for node in trajectory.forest if node.sampled and node.tokens and node.turn >= 0})
    earned = dict.fromkeys(turns, 0.0)
    for turn, reward in enumerate(judgement.steps) if turns else ():
        earned[turns[max(0, bisect_right(turns, turn) - 1)]] += reward
    if turns:
        earned[turns[-1]] += judgement.value - sum(judgement.steps)
    return earned
