# SPDX-License-Identifier: Apache-2.0
"""Conversion of rows to groups for `Algorithm.advantages`, and of advantages to tokens; mixtures of algorithms.

A member of a group is valid if its outcome was judged and its reward is a finite number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, groupby

import numpy as np
import torch
from torch import Tensor

from relax_core.api.algorithm import Advantages, Algorithm, Groups, Loss, LossBatch, Output, PolicyOutputs, Scope, Term
from relax_core.api.batch import ALGORITHM_INDEX, AttemptId, Column, Ragged, RowBatch
from relax_core.api.bus import Sealed
from relax_core.api.options import Options
from relax_core.learn.advantages import of_samples
from relax_core.learn.counts import charged_to, merge_metrics


class Grouping:
    """Rows of whole groups; `groups` is the algorithm's input, and `columns` converts its result to columns of rows.

    `samples` has all members. A member without rows is included, because its reward enters the group's statistics.
    Groups and members are numbered in the order of their ids.
    """

    def __init__(
        self, rows: RowBatch, samples: Mapping[AttemptId, Sealed], token_columns: Iterable[str] = (),
        weights: Mapping[str, float] | None = None,
    ) -> None:  # fmt: skip
        """Group the rows. `weights`: of the run's rewards, by name."""
        asked = tuple(token_columns)
        self._order = sorted(range(len(rows)), key=lambda row: rows.ids[row])
        ordered = rows.take(self._order)
        self._mask = ordered.columns["loss_mask"]
        members = {attempt: sealed for attempt, sealed in samples.items() if not sealed.baseline}
        places: dict[tuple[int, ...], tuple[int, int]] = {}
        for group, (_, own) in enumerate(groupby(sorted(members), key=lambda attempt: attempt.group)):
            places |= {attempt: (group, sample) for sample, attempt in enumerate(own)}
        size = max((sample for _, sample in places.values()), default=0) + 1
        self._shape = (max((group for group, _ in places.values()), default=-1) + 1, size)
        of_rows = [row[:3] for row in ordered.ids]
        if lost := [attempt for attempt in of_rows if attempt not in places]:
            raise ValueError(f"row of {lost[0]}: its sample is not among the samples given")
        in_rows = [places[attempt] for attempt in of_rows]
        self._row_sample = torch.tensor([group * size + sample for group, sample in in_rows], dtype=torch.int64)
        self._row_lengths = torch.from_numpy(self._mask.lengths.astype(np.int64))
        sample_of_token = np.repeat(self._row_sample.numpy(), self._mask.lengths)
        lengths = np.bincount(sample_of_token[self._mask.values.astype(bool)], minlength=self._shape[0] * size)

        of_members = np.array([places[attempt] for attempt in members], np.int64).reshape(-1, 2).T

        def rectangle(values: Iterable[float]) -> Tensor:
            """Return the members' values as [groups, samples], NaN if missing; float64 keeps rounding negligible."""
            filled = np.full(self._shape, np.nan)
            filled[tuple(of_members)] = list(values)
            return torch.from_numpy(filled)

        seals = members.values()
        self._masked = rectangle(float(sealed.masked) for sealed in seals) == 1
        rewards = rectangle(sealed.reward for sealed in seals)
        whole = rectangle(sealed.sample_reward for sealed in seals)
        valid = (rectangle(float(sealed.outcome.judged) for sealed in seals) == 1) & torch.isfinite(rewards)
        parts = {
            name: torch.where(valid, rectangle(sealed.parts.get(name, 0.0) for sealed in seals), 0.0)
            for name in sorted({name for sealed in seals for name in sealed.parts if name.count("/") < 2})
        }
        greedy = {attempt.group: sealed for attempt, sealed in samples.items() if sealed.baseline}
        baseline = torch.full((self._shape[0],), torch.nan, dtype=torch.float64) if greedy else None
        if baseline is not None:
            for attempt, (group, _) in places.items():
                sealed = greedy.get(attempt[0])
                if sealed is not None and sealed.outcome.judged:
                    baseline[group] = sealed.reward
        self.groups = Groups(
            rewards=torch.where(valid, rewards, 0.0),
            valid=valid,
            lengths=torch.from_numpy(lengths.astype(np.int64)).reshape(self._shape),
            parts=parts,
            weights=weights or {},
            token_columns={
                name: torch.from_numpy(ordered.columns[name].values.copy())
                for name in asked
                if np.array_equal(ordered.columns[name].lengths, self._mask.lengths)
            },
            row_lengths=self._row_lengths,
            row_sample=self._row_sample,
            baseline=baseline,
            step_rewards=(steps := self._turns(ordered, asked, "step_rewards", np.nan)),
            sample_rewards=None if steps is None else torch.where(valid, whole.float().double(), 0.0),
            states=self._turns(ordered, asked, "states", 0),
            contexts=self._turns(ordered, asked, "contexts", 0),
        )

    def _turns(self, ordered: RowBatch, asked: tuple[str, ...], name: str, missing: float) -> Tensor | None:
        """Return a column's value for each turn, [groups, samples, turns]; None if the column was not asked for."""
        if name not in asked or "turns" not in asked:
            return None
        turns, values = ordered.columns["turns"].values, ordered.columns[name].values
        sampled = turns >= 0
        samples = np.repeat(self._row_sample.numpy(), self._mask.lengths)[sampled]
        most = int(turns.max(initial=-1)) + 1
        dtype = np.float64 if values.dtype.kind == "f" else np.int64
        of_turn = np.full((self._shape[0] * self._shape[1], most), missing, dtype)
        of_turn[samples, turns[sampled]] = values[sampled]
        return torch.from_numpy(of_turn.reshape(*self._shape, most))

    def columns(self, advantages: Advantages) -> dict[str, Ragged]:
        """Return `advantages` (and `returns`) as token columns in the order of the given rows.

        Untrained tokens get 0. Samples that are not valid, or are masked, get the advantage 0.
        """
        for name, value in (("values", advantages.values), ("returns", advantages.returns)):
            if not isinstance(value, Tensor) and (name == "values" or value is not None):
                raise TypeError(f"Advantages.{name}: got {value!r:.80} ({type(value).__qualname__}); want a Tensor")
        values, valid = advantages.values, self.groups.valid
        if values.shape == valid.shape:
            values = of_samples(values, self.groups)
        trained = of_samples(valid & ~self._masked, self.groups)
        columns = {"advantages": self._column(values, "advantages", trained)}
        if advantages.returns is not None:
            columns["returns"] = self._column(advantages.returns, "returns", torch.ones_like(trained))
        return columns

    def _column(self, values: Tensor, name: str, counted: Tensor) -> Ragged:
        tokens = int(self._row_lengths.sum())
        if values.shape != (tokens,):
            raise ValueError(
                f"{name}: got shape {tuple(values.shape)}; give {self._shape} (groups, samples) or ({tokens},) (tokens)"
            )
        trained = torch.from_numpy(self._mask.values.astype(bool))
        values = torch.where(trained & counted, values, 0.0).to(torch.float32)
        if not bool(torch.isfinite(values).all()):
            raise ValueError(f"{name}: got NaN or Inf on a trained token; finite rewards must give finite values")
        back = np.argsort(np.asarray(self._order, dtype=np.int64), kind="stable")
        return Ragged(values.numpy(), self._mask.lengths).take(back.tolist())


def credited(
    algorithm: Algorithm, rows: RowBatch, samples: Mapping[AttemptId, Sealed], asked: Sequence[str],
    weights: Mapping[str, float] | None = None,
) -> dict[str, Ragged]:  # fmt: skip
    """Return the columns `advantages` and, for a critic, `returns` of rows in whole groups.

    `weights`: of the run's rewards, by name. Raises PluginError naming the algorithm if it fails or returns anything
    but finite advantages of the right shape.
    """
    if isinstance(algorithm, MixedAlgorithm):
        return algorithm.credit(rows, samples, asked, weights)
    grouping = Grouping(rows, samples, asked, weights)
    with charged_to(algorithm):
        advantages = algorithm.advantages(grouping.groups)
        if not isinstance(advantages, Advantages):
            raise TypeError(
                f"advantages() returned {advantages!r:.80} ({type(advantages).__qualname__}); want Advantages"
            )
        return grouping.columns(advantages)


class MixedAlgorithm(Algorithm[Options]):
    """Several algorithms of a run, combined for the trainer; the row column `algorithm_index` names each row's part.

    Each part credits its own groups and computes the loss of its own rows: the part gets the whole chunk, in which the
    remaining rows are masked. Terms are divided by the counts of the whole batch. Parts therefore weigh as much as
    their data, and an algorithm given twice gives the same result as once.
    """

    def __init__(self, parts: Sequence[tuple[str, Algorithm]]) -> None:
        super().__init__()
        names = [name for name, _ in parts]
        self._labels = [
            f"{name}-{n}" if (n := names[: at + 1].count(name)) > 1 else name for at, name in enumerate(names)
        ]
        self.parts = tuple(part for _, part in parts)
        self.reads_rewards = any(part.reads_rewards for part in self.parts)
        self.zero_advantage_skips = all(part.zero_advantage_skips for part in self.parts)
        all_declare = all(part.denominators for part in self.parts)
        self.denominators = (
            frozenset().union(*(part.denominators for part in self.parts)) if all_declare else frozenset()
        )

    @staticmethod
    def of(parts: Sequence[tuple[str, Algorithm]]) -> MixedAlgorithm:
        """Combine named parts into one algorithm with class attributes that meet the needs of all parts."""
        made = [part for _, part in parts]
        says = {
            "statistics": Scope.BATCH if any(part.statistics is Scope.BATCH for part in made) else made[0].statistics,
            "source": made[0].source,
            "fits": made[0].fits,
            "greedy_baseline": made[0].greedy_baseline,
            "min_group_size": max(part.min_group_size for part in made),
            "max_staleness": min((k for part in made if (k := part.max_staleness) is not None), default=None),
        }
        mixed: MixedAlgorithm = type("MixedAlgorithm", (MixedAlgorithm,), says)(parts)
        return mixed

    # -- columns and outputs -------------------------------------------------------------------------------------

    def columns(self) -> frozenset[Column]:
        return self._all(lambda part: part.columns()) | {ALGORITHM_INDEX}

    def advantage_columns(self) -> frozenset[Column]:
        return self._all(lambda part: part.advantage_columns()) | {ALGORITHM_INDEX}

    def reward_names(self) -> frozenset[str]:
        return frozenset(chain.from_iterable(part.reward_names() for part in self.parts))

    def prepared(self) -> frozenset[Column]:
        return self._all(lambda part: part.prepared())

    def fit_columns(self, fit: str) -> frozenset[Column]:
        return self._all(lambda part: part.fit_columns(fit)) | {ALGORITHM_INDEX}

    def outputs(self) -> frozenset[Output]:
        return frozenset(chain.from_iterable(part.outputs() for part in self.parts))

    def _all(self, asked: Callable[[Algorithm], frozenset[Column]]) -> frozenset[Column]:
        return frozenset(chain.from_iterable(map(asked, self.parts)))

    # -- credit --------------------------------------------------------------------------------------------------

    def credit(
        self, rows: RowBatch, samples: Mapping[AttemptId, Sealed], asked: Sequence[str],
        weights: Mapping[str, float] | None = None,
    ) -> dict[str, Ragged]:  # fmt: skip
        """Credit each part's own groups. A column that only some parts return is 0 in the remaining rows."""
        index = rows.columns[ALGORITHM_INDEX.name].values
        found: list[dict[str, Ragged]] = []
        order: list[int] = []
        for number, part in enumerate(self.parts):
            own = np.flatnonzero(index == number).tolist()
            groups = {rows.ids[row].group for row in own}
            members = {attempt: sealed for attempt, sealed in samples.items() if attempt.group in groups}
            if own:
                found.append(credited(part, rows.take(own), members, asked, weights))
                order += own
        back = np.argsort(np.array(order, np.int64), kind="stable").tolist()
        names = sorted({name for columns in found for name in columns})
        none = [Ragged(np.zeros_like(columns["advantages"].values), columns["advantages"].lengths) for columns in found]
        return {
            name: Ragged.concatenate([columns.get(name, zero) for columns, zero in zip(found, none, strict=True)]).take(back)
            for name in names
        }  # fmt: skip

    def advantages(self, groups: Groups) -> None:  # type: ignore[override]
        raise NotImplementedError("a mixture of algorithms needs the rows of its groups; call `credit`")

    # -- loss ----------------------------------------------------------------------------------------------------

    def prepare(self, batch: LossBatch) -> Mapping[str, Tensor]:
        made: dict[str, Tensor] = {}
        for part, own in self._own(batch):
            for name, values in part.prepare(own).items() if part.prepared() else ():
                mine = torch.where(own.loss_mask, values, torch.zeros_like(values))
                made[name] = made[name] + mine if name in made else mine
        return made

    def loss(self, batch: LossBatch, policy: PolicyOutputs) -> Loss:
        return self._joined(batch, lambda part, own: part.loss(own, policy))

    def fit_loss(self, fit: str, batch: LossBatch, outputs: PolicyOutputs) -> Loss:
        return self._joined(batch, lambda part, own: part.fit_loss(fit, own, outputs))

    def _own(self, batch: LossBatch) -> list[tuple[Algorithm, OwnRows]]:
        index = batch.column(ALGORITHM_INDEX.name)
        return [(part, OwnRows(batch, index == number)) for number, part in enumerate(self.parts)]

    def _joined(self, batch: LossBatch, loss_of: Callable[[Algorithm, OwnRows], Loss]) -> Loss:
        """Join the parts' terms and metrics under the parts' labels; also sum metrics under their plain names."""
        losses: list[tuple[OwnRows, Loss]] = []
        for part, own in self._own(batch):
            with charged_to(part):
                losses.append((own, loss_of(part, own)))
        terms: dict[str, Term] = {}
        counts: dict[str, Tensor] = {}
        metrics = merge_metrics(*(loss.metrics for _, loss in losses))
        for label, (own, loss) in zip(self._labels, losses, strict=True):
            terms |= {f"{label}/{name}": own.only(term) for name, term in loss.terms.items()}
            metrics |= {f"{label}/{name.rpartition('/')[2]}": metric for name, metric in loss.metrics.items()}
            for name, share in loss.counts.items():
                counts[name] = counts[name] + share if name in counts else share
        return Loss(terms, metrics, counts)


class OwnRows:
    """A `LossBatch` in which only some rows are trained; the remaining tokens are masked, and 0 in float columns."""

    def __init__(self, batch: LossBatch, rows: Tensor) -> None:
        self._batch, self._rows = batch, rows
        self.loss_mask = batch.loss_mask & batch.broadcast(rows)
        self.num_rows = batch.num_rows

    @property
    def advantages(self) -> Tensor:
        return self.column("advantages")

    def column(self, name: str) -> Tensor:
        values = self._batch.column(name)
        if not values.is_floating_point() or len(values) != len(self.loss_mask):
            return values
        return torch.where(self.loss_mask.reshape(-1, *[1] * (values.dim() - 1)), values, 0.0)

    def sequence_sum(self, values: Tensor) -> Tensor:
        return self._batch.sequence_sum(torch.where(self.loss_mask, values, 0.0))

    def sequence_mean(self, values: Tensor) -> Tensor:
        return self._batch.sequence_mean(torch.where(self.loss_mask, values, 0.0))

    def sample_mean(self, values: Tensor) -> Tensor:
        return self._batch.sample_mean(torch.where(self.loss_mask, values, 0.0))

    def broadcast(self, values: Tensor) -> Tensor:
        return self._batch.broadcast(values)

    def pair(self, values: Tensor) -> tuple[Tensor, Tensor]:
        return self._batch.pair(values)

    def only(self, term: Term) -> Term:
        """Return the term with 0 in place of its values outside the trained rows."""
        chosen = self.loss_mask if term.per == "token" else self._rows
        return replace(term, value=torch.where(chosen, term.value, 0.0))
