# SPDX-License-Identifier: Apache-2.0
"""From samples to whole groups and back: rectangles for `Algorithm.advantages`, then one value for every token.

It judges nothing: a member is valid where its outcome was judged and its reward is a finite number.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from relax_core.api.algorithm import Advantages, Groups
from relax_core.api.batch import AttemptId, Ragged, RowBatch
from relax_core.api.bus import Sealed


class Grouping:
    """Rows of whole groups; `groups` is what the algorithm sees, `columns` brings its answer back to the rows.

    `samples` are all members, also those without rows: their rewards belong to the group's statistics.
    """

    def __init__(self, rows: RowBatch, samples: Mapping[AttemptId, Sealed], token_columns: Iterable[str] = ()) -> None:
        self._order = sorted(range(len(rows)), key=lambda row: rows.ids[row])
        ordered = rows.take(self._order)
        self._mask = ordered.columns["loss_mask"]
        baselines = {attempt.group: sealed for attempt, sealed in samples.items() if sealed.baseline}
        samples = {attempt: sealed for attempt, sealed in samples.items() if not sealed.baseline}
        self._places = _places(samples)
        size = max((sample for _, sample in self._places.values()), default=0) + 1
        self._shape = (max((group for group, _ in self._places.values()), default=-1) + 1, size)
        places = [self._place(row.attempt_id) for row in ordered.ids]
        self._row_sample = torch.tensor([group * size + sample for group, sample in places], dtype=torch.int64)
        self._row_lengths = torch.from_numpy(self._mask.lengths.astype(np.int64))
        self.groups = self._groups(samples, ordered, tuple(token_columns), self._baseline(baselines))

    def columns(self, advantages: Advantages) -> dict[str, Ragged]:
        """`advantages` (and `returns`) as token columns in the order of the rows given; 0 on tokens not trained."""
        columns = {"advantages": self._column(self._per_token(advantages.values), "advantages")}
        if advantages.returns is not None:
            columns["returns"] = self._column(self._packed(advantages.returns, "returns"), "returns")
        return columns

    def _place(self, attempt: AttemptId) -> tuple[int, int]:
        if attempt not in self._places:
            raise ValueError(f"row of {tuple(attempt)}: its sample is not among the samples given")
        return self._places[attempt]

    def _baseline(self, baselines: Mapping[int, Sealed]) -> Tensor | None:
        """Of the groups in their order; None where no group has one."""
        if not baselines:
            return None
        values = torch.full((self._shape[0],), torch.nan, dtype=torch.float64)
        for attempt, (group, _) in self._places.items():
            greedy = baselines.get(attempt.group)
            if greedy is not None and greedy.outcome.judged:
                values[group] = greedy.reward
        return values

    def _groups(
        self, samples: Mapping[AttemptId, Sealed], ordered: RowBatch, token_columns: tuple[str, ...],
        baseline: Tensor | None,
    ) -> Groups:  # fmt: skip
        rewards = self._rectangle({attempt: sealed.reward for attempt, sealed in samples.items()})
        judged = self._rectangle({attempt: float(sealed.outcome.judged) for attempt, sealed in samples.items()})
        lengths = self._rectangle({attempt: float(sealed.trained_tokens) for attempt, sealed in samples.items()})
        valid = (judged == 1) & torch.isfinite(rewards)
        names = sorted({name for sealed in samples.values() for name in sealed.parts})
        parts = {name: self._rectangle({a: s.parts.get(name, 0.0) for a, s in samples.items()}) for name in names}
        return Groups(
            rewards=torch.where(valid, rewards, 0.0),
            valid=valid,
            lengths=torch.nan_to_num(lengths).long(),
            parts={name: torch.where(valid, part, 0.0) for name, part in parts.items()},
            token_columns={
                name: torch.from_numpy(ordered.columns[name].values.copy())
                for name in token_columns
                if np.array_equal(ordered.columns[name].lengths, self._mask.lengths)
            },
            row_lengths=self._row_lengths,
            row_sample=self._row_sample,
            baseline=baseline,
            step_rewards=self._turns(ordered, token_columns, "step_rewards", np.nan),
            states=self._turns(ordered, token_columns, "states", 0),
        )

    def _turns(self, ordered: RowBatch, asked: tuple[str, ...], name: str, missing: float) -> Tensor | None:
        """[groups, samples, turns]: what the tokens of each turn say of it; None where that was not asked for."""
        if name not in asked or "turns" not in asked:
            return None
        turns, values = ordered.columns["turns"].values, ordered.columns[name].values
        sampled = turns >= 0
        samples = np.repeat(self._row_sample.numpy(), self._mask.lengths)[sampled]
        most = int(turns.max(initial=-1)) + 1
        of_turn = np.full((self._shape[0] * self._shape[1], most), missing, _wide(values.dtype))
        of_turn[samples, turns[sampled]] = values[sampled]
        return torch.from_numpy(of_turn.reshape(*self._shape, most))

    def _rectangle(self, values: Mapping[AttemptId, float]) -> Tensor:
        """[groups, samples] in float64: statistics of a few rewards cost nothing and rounding would show."""
        rectangle = np.full(self._shape, np.nan)
        for attempt, value in values.items():
            rectangle[self._places[attempt]] = value
        return torch.from_numpy(rectangle)

    def _per_token(self, values: Tensor) -> Tensor:
        valid = self.groups.valid
        if values.shape != valid.shape:
            return self._packed(values, "advantages")
        of_row = torch.where(valid, values, 0.0).reshape(-1)[self._row_sample]
        return torch.repeat_interleave(of_row, self._row_lengths)

    def _packed(self, values: Tensor, name: str) -> Tensor:
        tokens = int(self._row_lengths.sum())
        if values.shape != (tokens,):
            raise ValueError(
                f"{name}: got shape {tuple(values.shape)}; give {self._shape} (groups, samples) or ({tokens},) (tokens)"
            )
        return values

    def _column(self, per_token: Tensor, name: str) -> Ragged:
        values = torch.where(torch.from_numpy(self._mask.values.astype(bool)), per_token, 0.0).to(torch.float32)
        if not bool(torch.isfinite(values).all()):
            raise ValueError(f"{name}: got NaN or Inf on a trained token; finite rewards must give finite values")
        back = np.argsort(np.asarray(self._order, dtype=np.int64), kind="stable")
        return Ragged(values.numpy(), self._mask.lengths).take(back.tolist())


def _wide(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """float64, or int64 of keys."""
    return np.dtype(np.float64 if dtype.kind == "f" else np.int64)


def _places(samples: Iterable[AttemptId]) -> dict[AttemptId, tuple[int, int]]:
    """(group, sample) place of every member: groups and members are numbered in the order of their ids."""
    places: dict[AttemptId, tuple[int, int]] = {}
    for group, (_, members) in enumerate(groupby(sorted(samples), key=lambda attempt: attempt.group)):
        places |= {attempt: (group, sample) for sample, attempt in enumerate(members)}
    return places
