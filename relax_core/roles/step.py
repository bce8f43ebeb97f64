# SPDX-License-Identifier: Apache-2.0
"""One step of a trained role as data: its claims, the parts of its updates, and its metrics. No IO, no torch.

A streamed step is one update in several parts; each part is trained while later groups are still being generated.
Otherwise one claim has all groups, and each part is a whole update.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from relax_core.api.batch import SAMPLE_TOKENS, Ragged, RowBatch, RowId
from relax_core.api.bus import Account, BusStatistics, Claim
from relax_core.api.errors import StaleFence
from relax_core.api.role import Clock
from relax_core.api.trainer import TrainerWork, UpdateOutcome, UpdateResult
from relax_core.api.weights import Version
from relax_core.learn.counts import (
    count,
    measured,
    merge_metrics,
    rows_with_gradient,
    sample_tokens,
    with_quantiles,
)

SHARES = 4
"""Largest lag with a metric `lag/share_<lag>`."""
MOST_LAG = 16
"""Largest lag with a metric `lag/samples/<lag>`; the metric of this lag also counts all samples with a larger lag."""


class ClaimedRows:
    """Rows of whole groups under one row lease. Masked samples are left out, and tokens that are too stale masked."""

    def __init__(self, claim: Claim, rows: RowBatch, zero_advantage_skips: bool = True) -> None:
        if masked := {seal.attempt for seal in claim.samples.values() if seal.masked}:
            rows = rows.take([index for index, row in enumerate(rows.ids) if row[:3] not in masked])
        if claim.mask_before:
            mask, versions = rows.columns["loss_mask"], rows.columns["weight_versions"].values
            young = Ragged(mask.values * (versions >= claim.mask_before), mask.lengths)
            rows = rows.with_columns({"loss_mask": young})
        if len({row[:3] for row in rows.ids}) < len(rows):  # rows of one sample may be trained in several chunks
            rows = rows.with_columns({SAMPLE_TOKENS.name: sample_tokens(rows)})
        self.claim, self.rows = claim, rows
        self.useful = frozenset(rows_with_gradient(rows) if zero_advantage_skips else range(len(rows)))
        """Indices of the rows to train."""

    def outdated(self, column: str, version: Version) -> list[int]:
        """Return the rows to train, by index, whose column is missing or was not computed under `version`."""
        if column not in self.rows.columns:
            return sorted(self.useful)
        made = self.claim.versions.get(column, {})
        return [index for index in sorted(self.useful) if made.get(self.rows.ids[index].group) != version]

    def fill(self, column: str, indices: Sequence[int], values: Ragged) -> None:
        """Replace the column's values in the rows at `indices`. If the column is new, the remaining rows get zeros."""
        own = self.rows.columns.get(column)
        tokens = self.rows.columns["tokens"]
        shape, dtype = (len(tokens.values), *values.values.shape[1:]), values.values.dtype
        filled = np.zeros(shape, dtype) if own is None else own.values.copy()
        starts = tokens.offsets()
        for index, row in zip(indices, values.rows(), strict=True):
            filled[starts[index] : starts[index + 1]] = row
        self.rows = self.rows.with_columns({column: Ragged(filled, tokens.lengths)})

    def take(self, indices: list[int]) -> RowBatch:
        return self.rows if len(indices) == len(self.rows) else self.rows.take(indices)


@dataclass(frozen=True, slots=True)
class StepPart:
    """Rows of one update that go to the trainer together."""

    rows: RowBatch
    """The rows with a gradient."""
    skipped: int
    """Number of rows left out because they have no gradient."""
    denominators: Mapping[str, float]
    """Counts that normalize the loss, over all rows of the update with the skipped; estimates before the last part."""
    opens: bool = True
    """True for the first part of an update."""
    ends: bool = True
    """True for the last part of an update."""


class TrainingStep:
    """The step that starts at `version` and trains up to `groups_per_step` groups."""

    def __init__(
        self, version: Version, groups_per_step: int, num_updates: int = 1, streams: bool = False, passes: int = 1
    ) -> None:
        """`num_updates`: updates of each of the `passes` over the step's rows."""
        self.version = version
        self.chunks: list[ClaimedRows] = []
        self.results: list[UpdateResult] = []
        """Results of the finished updates."""
        self._groups_per_step, self._num_updates, self._streams = groups_per_step, num_updates, streams
        self._passes = passes
        self._closed = False

    @property
    def left(self) -> int:
        """Number of groups that the step can still take."""
        return 0 if self._closed else self._groups_per_step - sum(len(claim.groups) for claim in self.claims)

    def add(self, chunk: ClaimedRows) -> list[StepPart]:
        """Add claimed rows; return the parts to train now. Raises StaleFence for a group that the step already has."""
        if again := {group for claim in self.claims for group in claim.groups} & set(chunk.claim.groups):
            raise StaleFence(
                f"group {min(again)} was claimed twice in one step: its first lease expired; restart the step"
            )
        self.chunks.append(chunk)
        self._closed = not self._streams or not self.left
        if self._num_updates == self._passes == 1:
            useful = sorted(chunk.useful)
            skipped = len(chunk.rows) - len(useful)
            return [StepPart(chunk.take(useful), skipped, self._denominators(), len(self.chunks) == 1, self._closed)]
        groups, parts = sorted({row.group for row in chunk.rows.ids}), []
        updates = max(1, min(self._num_updates, len(groups)))  # a step closed at its deadline may have few groups
        for number in range(updates):
            own = set(groups[number::updates])
            indices = [index for index, row in enumerate(chunk.rows.ids) if row.group in own]
            kept = [index for index in indices if index in chunk.useful]
            parts.append(StepPart(chunk.take(kept), len(indices) - len(kept), count(chunk.take(indices))))
        return parts * self._passes

    def close(self) -> list[StepPart]:
        """End the open update with the rows so far; return its last part, which has no rows."""
        self._closed = True
        return [StepPart(self.chunks[-1].take([]), 0, self._denominators(), opens=False)]

    def _denominators(self) -> dict[str, float]:
        """Return the counts of the update's rows; before the update ends, extrapolate them from the groups so far."""
        counts = [count(chunk.rows) for chunk in self.chunks]
        share = 1.0 if self._closed else (self._groups_per_step - self.left) / self._groups_per_step
        return {name: sum(own[name] for own in counts) / share for name in counts[0]}

    # -- the whole step -----------------------------------------------------------------------------------------

    @property
    def claims(self) -> list[Claim]:
        return [chunk.claim for chunk in self.chunks]

    @property
    def rows(self) -> RowBatch:
        """All rows in order of arrival, with the columns that every chunk has."""
        batches = [chunk.rows for chunk in self.chunks]
        if len(batches) == 1:
            return batches[0]
        names = set.intersection(*(set(batch.columns) for batch in batches))
        columns = {name: Ragged.concatenate([batch.columns[name] for batch in batches]) for name in sorted(names)}
        return RowBatch(tuple(row for batch in batches for row in batch.ids), columns)

    @property
    def without_gradient(self) -> tuple[RowId, ...]:
        trained = {chunk.rows.ids[index] for chunk in self.chunks for index in chunk.useful}
        return tuple(row for claim in self.claims for row in claim.rows if row not in trained)

    @property
    def moved(self) -> bool:
        """True if an update of the step must have changed the weights."""
        applied = [result for result in self.results if result.outcome is UpdateOutcome.APPLIED]
        return any(result.grad_norm > 0 and result.lr > 0 for result in applied)


class StepTimes:
    """Seconds of a step by phase. A streamed step alternates between waiting and training."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.start = self._last = clock.now()
        self._phases: dict[str, float] = {}

    def mark(self, phase: str) -> None:
        """Add the time since the last mark to a phase."""
        now = self._clock.now()
        self._phases[phase] = self._phases.get(phase, 0.0) + now - self._last
        self._last = now

    def seconds(self) -> dict[str, float]:
        times = {f"time/{phase}_s": seconds for phase, seconds in self._phases.items()}
        return {"time/step_s": self._last - self.start, **times}


def learning_metrics(step: TrainingStep) -> dict[str, float]:
    """Compute the documented metrics that are known once a step is trained, over all of its rows."""
    rows, results = step.rows, step.results
    metrics: dict[str, float] = {}
    if "weight_versions" in rows.columns:  # rows of a dataset were not sampled: they have neither rewards nor lag
        every = [seal for claim in step.claims for seal in claim.samples.values()]
        judged = [seal for seal in every if seal.outcome.judged]
        seals = [seal for seal in judged if not seal.baseline]
        parts: dict[str, list[float]] = defaultdict(list)
        for seal in every:
            for name, part in seal.parts.items():  # parts that measure the scoring itself count even if it failed
                if not seal.baseline and (seal.outcome.judged or name.count("/") > 1):
                    parts[name].append(part)
        metrics |= {f"reward/{name}": float(np.mean(parts[name])) for name in sorted(parts)}
        if greedy := [seal.reward for seal in judged if seal.baseline]:
            metrics["reward/greedy"] = float(np.mean(greedy))
        if seals:
            rewards = np.array([seal.reward for seal in seals])
            metrics |= {"reward/mean": float(rewards.mean()), "reward/std": float(rewards.std())}
        metrics |= _lag_metrics(rows, step.version)
    if "advantages" in rows.columns:
        metrics |= _advantage_metrics(rows)
    mask = rows.columns["loss_mask"]
    lengths = np.bincount(np.repeat(np.arange(len(rows)), mask.lengths), mask.values, len(rows))
    metrics["tokens/trained"] = float(lengths.sum())
    if len(lengths):
        metrics |= {"length/mean": float(lengths.mean()), "length/max": float(lengths.max())}
    merged = with_quantiles(merge_metrics(*(result.metrics for result in results)))
    return {
        **metrics,
        **measured(merged),
        "train/grad_norm": float(np.mean([result.grad_norm for result in results])),
        "train/lr": results[-1].lr,
        "train/skipped_updates": float(sum(result.outcome is not UpdateOutcome.APPLIED for result in results)),
    }


def work_metrics(work: TrainerWork, train_s: float, ranks: int, group: str = "trainer") -> dict[str, float]:
    """Compute the metrics of a step's work on `ranks` devices in `train_s` seconds; none if the trainer counts no work."""
    every = work.flops + work.forward_flops
    if not every:
        return {}
    metrics = {
        f"{group}/flops": work.flops, f"{group}/forward_flops": work.forward_flops,
        f"{group}/padding": work.padding / max(work.tokens, 1.0),
    }  # fmt: skip
    if train_s > 0:
        metrics[f"{group}/tflops_per_s"] = every / train_s / ranks / 1e12
        if work.peak_flops_per_s:
            metrics[f"{group}/mfu"] = every / train_s / work.peak_flops_per_s
    return metrics


def step_metrics(
    learnt: Mapping[str, float], times: StepTimes, account: Account, statistics: BusStatistics
) -> dict[str, float]:
    """Add the metrics that are known once a step is committed."""
    return {
        **learnt,
        **times.seconds(),
        "samples/issued": float(account.issued),
        "samples/trained": float(account.trained),
        "samples/no_gradient": float(account.trained_without_gradient),
        "samples/dropped": float(sum(account.dropped.values())),
        **{f"samples/dropped/{reason}": float(number) for reason, number in account.dropped.items()},
        "samples/in_flight": float(account.in_flight),
        "samples/balanced": float(account.balanced),
        "bus/rows": float(statistics.get("rows", 0)),
        "bus/bytes": float(statistics.get("bytes", 0)),
    }


def _advantage_metrics(rows: RowBatch) -> dict[str, float]:
    """Measure the groups whose advantages are all 0. A KL term may still give their samples a gradient."""
    trained = rows.columns["loss_mask"].values.astype(bool)
    groups = np.repeat([row.group for row in rows.ids], rows.columns["loss_mask"].lengths)[trained]
    every, with_advantage = np.unique(groups), np.unique(groups[rows.columns["advantages"].values[trained] != 0])
    return {"reward/no_advantage": 1.0 - len(with_advantage) / len(every)} if len(every) else {}


def _lag_metrics(rows: RowBatch, version: Version) -> dict[str, float]:
    """Measure the lag of trained tokens, and count samples by the lag of their oldest trained token."""
    trained, versions = rows.columns["loss_mask"].values.astype(bool), rows.columns["weight_versions"]
    lag = version.step - versions.values[trained]
    if not len(lag):
        return {}
    shares = np.bincount(lag.clip(0, SHARES + 1).astype(np.int64)) / len(lag)
    places: dict[tuple[int, int], int] = {}
    samples = [places.setdefault((row.group, row.sample), len(places)) for row in rows.ids]
    oldest = np.full(len(places), version.step + 1, np.int64)
    np.minimum.at(oldest, np.repeat(samples, versions.lengths)[trained], versions.values[trained])
    lags = Counter(min(version.step - step, MOST_LAG) for step in oldest.tolist() if step <= version.step)
    return {
        "lag/mean": float(lag.mean()),
        "lag/p50": float(np.median(lag)),
        "lag/max": float(lag.max()),
        **{f"lag/share_{at}": float(share) for at, share in enumerate(shares[: SHARES + 1])},
        **{f"lag/samples/{at}": float(number) for at, number in sorted(lags.items())},
    }


def critic_metrics(step: TrainingStep, seconds: float) -> dict[str, float]:
    """Compute the documented metrics of a critic's step.

    The returns are compared with the values that the advantages were computed from: those before the step's updates.
    """
    merged = merge_metrics(*(result.metrics for result in step.results))
    metrics = {
        **measured(merged),
        "critic/grad_norm": float(np.mean([result.grad_norm for result in step.results])),
        "critic/lr": step.results[-1].lr,
        "time/critic_s": seconds,
    }
    columns = step.rows.columns
    if {"values", "returns"} <= columns.keys():
        trained = columns["loss_mask"].values.astype(bool)
        values, returns = columns["values"].values[trained], columns["returns"].values[trained]
        if len(returns):
            metrics |= {"critic/value_mean": float(values.mean()), "critic/return_mean": float(returns.mean())}
            if (spread := float(returns.var())) > 0:
                metrics["critic/explained_variance"] = 1.0 - float((returns - values).var()) / spread
    return metrics
