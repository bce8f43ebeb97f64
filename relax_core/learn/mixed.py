# SPDX-License-Identifier: Apache-2.0
"""Several algorithms in one run: groups are credited by their own one, and every row has its own one's loss.

To the trainer it is one algorithm. Each part sees the whole chunk with the rows of the others masked. Terms are divided by
the counts of the whole batch: every token, row or sample weighs what it would in a run of its algorithm alone on that
batch, so that the mixture is that of the data, and one algorithm given twice is that algorithm.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from relax_core.api.algorithm import Algorithm, Groups, Loss, LossBatch, Output, PolicyOutputs, Scope, Term
from relax_core.api.batch import ALGORITHM_INDEX, AttemptId, Column, Ragged, RowBatch
from relax_core.api.bus import Sealed
from relax_core.api.options import Options
from relax_core.learn.groups import Grouping

Metrics = dict[str, tuple[Tensor, Tensor]]


class MixedAlgorithm(Algorithm[Options]):
    """Parts by number; the row column `algorithm_index` says which one a row has."""

    def __init__(self, parts: Sequence[tuple[str, Algorithm]]) -> None:
        super().__init__()
        names = [name for name, _ in parts]
        self._labels = [
            f"{name}-{n}" if (n := names[: at + 1].count(name)) > 1 else name for at, name in enumerate(names)
        ]
        self.parts = tuple(part for _, part in parts)
        self.reads_rewards = any(part.reads_rewards for part in self.parts)
        self.zero_advantage_skips = all(part.zero_advantage_skips for part in self.parts)
        told = all(part.denominators for part in self.parts)
        self.denominators = frozenset().union(*(part.denominators for part in self.parts)) if told else frozenset()

    @staticmethod
    def of(parts: Sequence[tuple[str, Algorithm]]) -> MixedAlgorithm:
        """Parts with their names; what the class of an algorithm says is what all of them need."""
        made = [part for _, part in parts]
        says = {
            "statistics": Scope.BATCH if any(part.statistics is Scope.BATCH for part in made) else made[0].statistics,
            "source": made[0].source,
            "fits": made[0].fits,
            "greedy_baseline": made[0].greedy_baseline,
            "min_group_size": max(part.min_group_size for part in made),
            "max_staleness": min((k for part in made if (k := part.max_staleness) is not None), default=None),
            "old_log_probs_tolerance": min(part.old_log_probs_tolerance for part in made),
        }
        routed: MixedAlgorithm = type("MixedAlgorithm", (MixedAlgorithm,), says)(parts)
        return routed

    # -- what they read ------------------------------------------------------------------------------------------

    def columns(self) -> frozenset[Column]:
        return self._all(lambda part: part.columns()) | {ALGORITHM_INDEX}

    def advantage_columns(self) -> frozenset[Column]:
        return self._all(lambda part: part.advantage_columns()) | {ALGORITHM_INDEX}

    def prepared(self) -> frozenset[Column]:
        return self._all(lambda part: part.prepared())

    def fit_columns(self, fit: str) -> frozenset[Column]:
        return self._all(lambda part: part.fit_columns(fit)) | {ALGORITHM_INDEX}

    def outputs(self) -> frozenset[Output]:
        return frozenset(chain.from_iterable(part.outputs() for part in self.parts))

    def _all(self, asked: Callable[[Algorithm], frozenset[Column]]) -> frozenset[Column]:
        return frozenset(chain.from_iterable(map(asked, self.parts)))

    # -- credit --------------------------------------------------------------------------------------------------

    def credit(self, rows: RowBatch, samples: Mapping[AttemptId, Sealed], asked: Sequence[str]) -> dict[str, Ragged]:
        """`Grouping.columns` of each part for its own groups; 0 where a part gives a column that another does not."""
        index = rows.columns[ALGORITHM_INDEX.name].values
        found: list[dict[str, Ragged]] = []
        order: list[int] = []
        for number, part in enumerate(self.parts):
            own = np.flatnonzero(index == number).tolist()
            groups = {rows.ids[row].group for row in own}
            members = {attempt: sealed for attempt, sealed in samples.items() if attempt.group in groups}
            if own:
                found.append(credited(part, rows.take(own), members, asked))
                order += own
        back = np.argsort(np.array(order, np.int64), kind="stable").tolist()
        names = sorted({name for columns in found for name in columns})
        none = [Ragged(np.zeros_like(columns["advantages"].values), columns["advantages"].lengths) for columns in found]
        return {
            name: Ragged.concatenate([columns.get(name, zero) for columns, zero in zip(found, none, strict=True)]).take(back)
            for name in names
        }  # fmt: skip

    def advantages(self, groups: Groups) -> None:  # type: ignore[override]
        raise NotImplementedError("several algorithms: their groups are told apart by rows; call `credit`")

    # -- loss ----------------------------------------------------------------------------------------------------

    def prepare(self, batch: LossBatch) -> Mapping[str, Tensor]:
        made: dict[str, Tensor] = {}
        for part, own in self._own(batch):
            for name, values in part.prepare(own).items() if part.prepared() else ():
                mine = torch.where(own.trained, values, torch.zeros_like(values))
                made[name] = made[name] + mine if name in made else mine
        return made

    def loss(self, batch: LossBatch, policy: PolicyOutputs) -> Loss:
        return self._joined([(own, part.loss(own, policy)) for part, own in self._own(batch)])

    def fit_loss(self, fit: str, batch: LossBatch, outputs: PolicyOutputs) -> Loss:
        return self._joined([(own, part.fit_loss(fit, own, outputs)) for part, own in self._own(batch)])

    def _own(self, batch: LossBatch) -> list[tuple[Algorithm, OwnRows]]:
        index = batch.column(ALGORITHM_INDEX.name)
        return [(part, OwnRows(batch, index == number)) for number, part in enumerate(self.parts)]

    def _joined(self, losses: Sequence[tuple[OwnRows, Loss]]) -> Loss:
        """Terms and metrics of each under its label; metrics of all together under their own names, too."""
        terms: dict[str, Term] = {}
        metrics, counts = Metrics(), dict[str, Tensor]()
        for label, (own, loss) in zip(self._labels, losses, strict=True):
            terms |= {f"{label}/{name}": own.only(term) for name, term in loss.terms.items()}
            for name, metric in loss.metrics.items():
                metrics[f"{label}/{name.rpartition('/')[2]}"] = metric
                metrics[name] = _merged(name, metrics.get(name), metric)
            for name, share in loss.counts.items():
                counts[name] = counts[name] + share if name in counts else share
        return Loss(terms, metrics, counts)


class OwnRows:
    """A `LossBatch` in which only some rows are trained; columns of the others are 0, as those of masked tokens are."""

    def __init__(self, batch: LossBatch, rows: Tensor) -> None:
        self._batch, self._rows = batch, rows
        self.trained = batch.loss_mask & batch.broadcast(rows)
        self.num_rows = batch.num_rows

    @property
    def loss_mask(self) -> Tensor:
        return self.trained

    @property
    def advantages(self) -> Tensor:
        return self.column("advantages")

    def column(self, name: str) -> Tensor:
        values = self._batch.column(name)
        if not values.is_floating_point() or len(values) != len(self.trained):
            return values
        return torch.where(self.trained.reshape(-1, *[1] * (values.dim() - 1)), values, 0.0)

    def sequence_sum(self, values: Tensor) -> Tensor:
        return self._batch.sequence_sum(torch.where(self.trained, values, 0.0))

    def sequence_mean(self, values: Tensor) -> Tensor:
        return self._batch.sequence_mean(torch.where(self.trained, values, 0.0))

    def broadcast(self, values: Tensor) -> Tensor:
        return self._batch.broadcast(values)

    def pair(self, values: Tensor) -> tuple[Tensor, Tensor]:
        return self._batch.pair(values)

    def only(self, term: Term) -> Term:
        """The term, of these rows."""
        chosen = self.trained if term.per == "token" else self._rows
        return replace(term, value=torch.where(chosen, term.value, 0.0))


def credited(
    algorithm: Algorithm, rows: RowBatch, samples: Mapping[AttemptId, Sealed], asked: Sequence[str]
) -> dict[str, Ragged]:
    """What an algorithm makes of whole groups: the columns `advantages` and, for a critic, `returns`."""
    if isinstance(algorithm, MixedAlgorithm):
        return algorithm.credit(rows, samples, asked)
    grouping = Grouping(rows, samples, asked)
    return grouping.columns(algorithm.advantages(grouping.groups))


def _merged(name: str, one: tuple[Tensor, Tensor] | None, other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Of two parts as of two chunks: extremes are kept, all else is added."""
    if one is None:
        return other
    if name.endswith(("_max", "_min")):
        if not bool(one[1]) or not bool(other[1]):
            return other if not bool(one[1]) else one
        pick = torch.maximum if name.endswith("_max") else torch.minimum
        return pick(one[0], other[0]), torch.maximum(one[1], other[1])
    return one[0] + other[0], one[1] + other[1]
