# SPDX-License-Identifier: Apache-2.0
"""The mismatch of engine and trainer: the differences of their log-probs for the same tokens.

The configured engines sample, and the configured trainer computes log-probs of the sampled tokens. Nothing is trained.
With several number formats, each engine format samples once and each trainer format starts once.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from math import ceil
from pathlib import Path
from typing import Self

import numpy as np

from relax_core.api.algorithm import Source
from relax_core.api.batch import Ragged, RowBatch
from relax_core.api.errors import ConfigError
from relax_core.api.family import ROUTED_COLUMNS
from relax_core.config.layers import Source as Layer
from relax_core.launch import Catalogue, Launch, RunConfig, plan
from relax_core.learn.counts import MAX_LOG_RATIO
from relax_core.rewards.host import ScoredSample
from relax_core.roles.rank_group import RankGroup
from relax_core.runners.context import RoleContext
from relax_core.sampling.groups import InflightGroup
from relax_core.sampling.rollout_worker import RolloutWorker
from relax_core.sampling.rows import row_batch
from relax_plugin_workbench.single_role import first_attempts, ignore, single_role, try_launch

FORMATS = ("float32", "bfloat16", "float16")
EXPERTS, VALID = ROUTED_COLUMNS
FIRST = 16
"""Number of sampled tokens in a sample's first part; each later part ends at four times the previous part's end."""


@dataclass(frozen=True, slots=True)
class Setting:
    """The number formats of trainer and engine; with `replay`, the trainer reuses the engine's routing to experts."""

    trainer: str
    engine: str
    replay: bool = False


@dataclass(frozen=True, slots=True)
class MismatchReport:
    """The differences of one setting, or the reason why the setting can't run."""

    setting: Setting
    found: Differences | None
    refused: str = ""
    rerouted: float | None = None
    """Share of input tokens that trainer and engine route to different experts without replay; None: not measured."""


async def mismatch(
    sources: Sequence[Layer], overrides: Sequence[str], num_samples: int, formats: Sequence[str] = ()
) -> list[MismatchReport]:
    """Measure the configured formats, or each pair of `formats`, with and without replay if replay is possible."""
    with tempfile.TemporaryDirectory(prefix="relax-mismatch-") as directory:
        config, launch, catalogue = try_launch(sources, overrides, Path(directory))
        if launch.plan.source is not Source.ROLLOUT:
            fix = "the algorithm samples nothing; choose one that learns from samples"
            raise ConfigError("algorithm.name", config.algorithm.name, fix)
        settings = [Setting(config.model.dtype, config.engine_dtype, config.model.routing_replay == "rollout")]
        if formats:
            replays = [False, True]
            try:
                _variant(launch, config, catalogue, replace(settings[0], replay=True))
            except ConfigError:
                replays = [False]
            settings = [
                Setting(trainer, engine, replay) for trainer, engine, replay in product(formats, formats, replays)
            ]
        able: dict[Setting, Launch] = {}
        reports: dict[Setting, MismatchReport] = {}
        for setting in settings:
            try:
                able[setting] = _variant(launch, config, catalogue, setting)
            except ConfigError as error:
                reports[setting] = MismatchReport(setting, None, str(error))
        if not able:
            raise ConfigError(
                "relax bench mismatch", reports[settings[0]].refused, "no setting can run; change the formats"
            )
        # For each format, take the launch of its last setting, which has replay if any setting of the format has.
        engines = {setting.engine: varied for setting, varied in able.items()}
        trainers = {setting.trainer: varied for setting, varied in able.items()}
        rows: dict[str, RowBatch] = {}
        for engine, varied in engines.items():
            async with single_role("rollout", varied, catalogue) as context:
                worker = await RolloutWorker.open(context, ignore)
                try:
                    rows[engine] = await _sampled(context, worker, num_samples)
                finally:
                    await worker.close()
        for dtype, varied in trainers.items():
            async with single_role("actor", varied, catalogue) as context:
                trainer = await RankGroup.start(context, "actor")
                try:
                    for setting in (setting for setting in able if setting.trainer == dtype):
                        reports[setting] = await _compared(trainer, rows[setting.engine], setting)
                finally:
                    await trainer.stop()
        return [reports[setting] for setting in settings]


def _variant(launch: Launch, config: RunConfig, catalogue: Catalogue, setting: Setting) -> Launch:
    """Plan the run with the formats of a setting. Raises ConfigError if the setting can't run."""
    replay = "rollout" if setting.replay else "off"
    model = config.model.model_copy(update={"dtype": setting.trainer, "routing_replay": replay})
    rollout = config.rollout.model_copy(update={"dtype": setting.engine})
    changed = config.model_copy(update={"model": model, "rollout": rollout})
    return replace(launch, config=changed.dump(), plan=plan(changed, catalogue))


@dataclass(frozen=True, slots=True)
class Differences:
    """Differences d of log-probs, trainer - engine, over all sampled tokens; `mean`, `p99` and `max` are of abs(d)."""

    tokens: int
    mean: float
    p99: float
    """99 % of tokens have at most this abs(d)."""
    max: float
    k3_kl: float
    """KL of engine to trainer per token: the mean of exp(d) - 1 - d."""
    ratio_min: float
    ratio_max: float
    positions: tuple[tuple[int, float], ...] = ()
    """(end, mean of abs(d)) for each part of the samples: the sampled tokens from the previous end to `end`."""

    @classmethod
    def of(cls, rows: RowBatch, log_probs: Ragged) -> Self:
        """Compare the rows with a trainer's `log_probs` [tokens] of the same rows in the same order."""
        lengths, mask = rows.columns["tokens"].lengths, rows.columns["loss_mask"].values.astype(bool)
        apart = log_probs.values[mask].astype(np.float64) - rows.columns["rollout_log_probs"].values[mask]
        before = np.cumsum(mask) - mask  # sampled tokens before each token, over all rows
        starts = np.cumsum(lengths) - lengths
        places = before - np.repeat(before[np.minimum(starts, len(before) - 1)], lengths)
        return cls.between(apart, places[mask])

    @classmethod
    def between(cls, apart: np.ndarray, places: np.ndarray) -> Self:
        """Summarise differences [tokens] of one or more tokens; `places` [tokens] are positions in the samples."""
        size, log = np.abs(apart), apart.clip(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        ranked = np.sort(size)
        return cls(
            len(size), float(size.mean()), float(ranked[len(size) - 1 - int(len(size) * 0.01)]), float(size.max()),
            float((np.expm1(log) - log).mean()), float(np.exp(log.min())), float(np.exp(log.max())),
            tuple(_means_by_position(size, places)),
        )  # fmt: skip

    def plain(self) -> dict[str, object]:
        """Return the differences as plain data for JSON."""
        positions = [{"before": end, "mean": mean} for end, mean in self.positions]
        return {**asdict(self), "positions": positions}


def _means_by_position(size: np.ndarray, places: np.ndarray) -> list[tuple[int, float]]:
    means, start, end = [], 0, FIRST
    while start <= int(places.max()):
        part = size[(places >= start) & (places < end)]
        if len(part):
            means.append((end, float(part.mean())))
        start, end = end, end * 4
    return means


async def _sampled(context: RoleContext, worker: RolloutWorker, num_samples: int) -> RowBatch:
    """Sample whole groups with the weights of the model's folder, and convert the samples to rows as training would."""
    size, at_once = context.plan.group_size, int(context.config.rollout.groups_per_step)
    numbers = range(ceil(num_samples / size))
    issues = [first_attempts(number, size) for number in numbers]
    groups: list[InflightGroup] = []
    for first in range(0, len(issues), at_once):
        made = (worker.make(issue, worker.engines.newest()) for issue in issues[first : first + at_once])
        groups += await asyncio.gather(*made)
    samples = [
        (attempt, trajectory, ScoredSample(0.0, outcome=trajectory.outcome))
        for group in groups
        for attempt, trajectory in zip(group.issue.attempts, group.trajectories, strict=True)
    ]
    asked = {*context.plan.consumed, *(("media",) if context.config.media else ())}
    rows, _ = row_batch(samples, context.plan.greedy, asked, worker.routing)
    if not len(rows):
        outcomes = ", ".join(sorted({str(trajectory.outcome) for _, trajectory, _ in samples}))
        raise ConfigError("relax bench mismatch", f"no sample that could be trained ({outcomes})", "see relax try")
    return rows


async def _compared(trainer: RankGroup, rows: RowBatch, setting: Setting) -> MismatchReport:
    """Compare a trainer's log-probs with those of the engine that sampled the rows."""
    unrouted = {name: column for name, column in rows.columns.items() if name not in ROUTED_COLUMNS}
    asks, given = ("log_probs",), RowBatch(rows.ids, unrouted)
    if EXPERTS not in rows.columns:
        return MismatchReport(setting, Differences.of(rows, (await trainer.forward(given, asks))["log_probs"]))
    routed = await trainer.forward(given, (*asks, EXPERTS))
    replayed = await trainer.forward(rows, asks) if setting.replay else routed
    # The share of input tokens for which the trainer's experts, order ignored, differ from the engine's.
    fed = rows.columns[VALID].values.astype(bool)
    fed[np.cumsum(rows.columns["tokens"].lengths) - 1] = False  # a row's last token is never an input of the model
    engine, trained = (np.sort(experts.values, axis=-1) for experts in (rows.columns[EXPERTS], routed[EXPERTS]))
    share = float((engine != trained).any(axis=(1, 2))[fed].mean()) if fed.any() else 0.0
    return MismatchReport(setting, Differences.of(rows, replayed["log_probs"]), rerouted=share)
