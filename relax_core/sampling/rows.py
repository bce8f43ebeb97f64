# SPDX-License-Identifier: Apache-2.0
"""From trajectories to rows of the bus: the only place where samples become columns, a whole delivery at once.

Columns for the credit of turns: which turn of its sample a token is of, the state that it began in, what it earned.

What no turn was credited with (rewards that judge a whole sample) is earned by the last one, so that the turns of a
sample together earn its reward.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from relax_core.api.batch import STATES, STEP_REWARDS, TURNS, AttemptId, Column, Ragged, RowBatch, RowId
from relax_core.api.bus import Sealed
from relax_core.api.routing import Routing
from relax_core.api.trajectory import Path, Trajectory
from relax_core.engines.routes import route_columns
from relax_core.media.store import key_bytes
from relax_core.rewards.scorer import ScoredSample

if TYPE_CHECKING:
    import numpy as np


TURN_COLUMNS = frozenset({TURNS.name, STATES.name, STEP_REWARDS.name})
GIVEN = (-1, 0, 0.0)
"""Turn, state and reward of tokens that nobody sampled."""


def turn_columns(
    samples: Sequence[tuple[tuple[Path, ...], Trajectory, ScoredSample]], lengths: np.ndarray
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


def _earned(trajectory: Trajectory, judgement: ScoredSample) -> dict[int, float]:
    """By turn. A turn of no tokens has no place in a row: what it earned is the one's before it."""
    turns = sorted({node.turn for node in trajectory.forest if node.sampled and node.tokens and node.turn >= 0})
    earned = dict.fromkeys(turns, 0.0)
    for turn, reward in enumerate(judgement.steps) if turns else ():
        earned[turns[max(0, bisect_right(turns, turn) - 1)]] += reward
    if turns:
        earned[turns[-1]] += judgement.value - sum(judgement.steps)
    return earned


def row_batch(
    samples: Sequence[tuple[AttemptId, Trajectory, ScoredSample]],
    greedy: int | None = None,
    asked: Collection[str] = (),
    routing: Routing | None = None,
) -> tuple[RowBatch, list[Sealed]]:
    """Rows with the columns that rollout produces, and a seal for each sample; samples without a verdict have no rows, nor
    has the one whose place is `greedy`. Columns of turns, and of media, are made where they are `asked` for; those of
    routes where it is told how the model routes."""
    ids: list[RowId] = []
    rewards: list[float] = []
    owned: list[tuple[Path, ...]] = []
    for attempt, trajectory, judgement in samples:
        own = trajectory.paths() if judgement.outcome.judged and attempt.sample != greedy else ()
        ids += [RowId(*attempt, number) for number in range(len(own))]
        rewards += [judgement.value] * len(own)
        owned.append(own)
    columns = _columns([*chain.from_iterable(owned)], rewards)
    if not TURN_COLUMNS.isdisjoint(asked):
        told = [(paths, trajectory, judged) for paths, (_, trajectory, judged) in zip(owned, samples, strict=True)]
        made = turn_columns(told, columns["tokens"].lengths)
        columns |= {name: column for name, column in made.items() if name in asked}
    sealed = [
        Sealed(
            attempt, len(own), judgement.outcome, judgement.value, oldest, trained, judgement.parts,
            newest if trajectory.newest is None or not trained else trajectory.newest, attempt.sample == greedy,
        )
        for (attempt, trajectory, judgement), own, (trained, oldest, newest)
        in zip(samples, owned, _trained(columns, [len(own) for own in owned]), strict=True)
    ]  # fmt: skip
    if "media" in asked:
        columns["media"] = _media([*chain.from_iterable(owned)])
    if routing is not None:
        columns |= route_columns([*chain.from_iterable(owned)], routing, columns["tokens"].lengths)
    return RowBatch(tuple(ids), columns), sealed


def _media(paths: Sequence[Path]) -> Ragged:
    """Keys in the order of their placeholders."""
    return Ragged.of([key_bytes([key for node, _ in path for key in node.media]) for path in paths], like=key_bytes(()))


def with_row_column(rows: RowBatch, column: Column, values: Sequence[float]) -> RowBatch:
    """The rows with one more number each."""
    import numpy as np

    told = Ragged(np.array(values, column.dtype), np.ones(len(rows), np.int64))
    return rows.with_columns({column.name: told})


def _columns(paths: Sequence[Path], rewards: Sequence[float]) -> dict[str, Ragged]:
    import numpy as np

    lengths = np.array([sum(len(node.tokens) for node, _ in path) for path in paths], np.int64)
    total = int(lengths.sum())
    nodes = [node for path in paths for node, _ in path]
    widths = [len(node.tokens) for node in nodes]
    loss_mask = np.repeat(np.array([trained for path in paths for _, trained in path], np.uint8), widths)
    sampled = np.repeat(np.array([node.sampled for node in nodes], bool), widths)

    def column(values: Iterable[Sequence[Any]], given: float, dtype: Any) -> Ragged:
        """What sampled nodes hold, and for the tokens of the others `given`."""
        whole = np.full(total, given, dtype)
        whole[sampled] = np.fromiter(chain.from_iterable(values), dtype, int(sampled.sum()))
        return Ragged(whole, lengths)

    return {
        "tokens": Ragged(np.fromiter(chain.from_iterable(node.tokens for node in nodes), np.int32, total), lengths),
        "loss_mask": Ragged(loss_mask, lengths),
        "rollout_log_probs": column((node.log_probs for node in nodes if node.sampled), 0.0, np.float32),
        "weight_versions": column((node.versions for node in nodes if node.sampled), -1, np.int32),
        "rewards": Ragged(np.array(rewards, np.float32), np.ones(len(paths), np.int64)),
    }


def _trained(columns: dict[str, Ragged], num_rows: Sequence[int]) -> Iterator[tuple[int, int, int | None]]:
    """Of each sample: its trained tokens, and the oldest and the newest version among them; 0 and None where there are none."""
    import numpy as np

    mask = columns["loss_mask"]
    before = np.concatenate(([0], np.cumsum(mask.values, dtype=np.int64)))[mask.offsets()]
    sizes = np.array(num_rows, np.int64)
    ends = np.cumsum(sizes)
    counts = before[ends] - before[ends - sizes]
    some = counts > 0
    starts = (np.cumsum(counts) - counts)[some]
    versions = columns["weight_versions"].values[mask.values.astype(bool)]
    oldest = iter(_reduced(np.minimum, versions, starts))
    newest = iter(_reduced(np.maximum, versions, starts))
    return ((count, next(oldest), next(newest)) if count else (0, 0, None) for count in counts.tolist())


def _reduced(how: np.ufunc, values: np.ndarray, starts: np.ndarray) -> list[int]:
    found: list[int] = how.reduceat(values, starts).tolist() if len(starts) else []
    return found
