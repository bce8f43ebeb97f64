# SPDX-License-Identifier: Apache-2.0
"""How far engine and trainer of a configuration are apart: samples of its real engines, log-probs of the same tokens by its
real trainer, and no training between. Of several number formats each engine samples once and each trainer starts once.

Differences of log-probs over all tokens of a sample at once, exactly: what a run's meter adds up in parts. No IO.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from itertools import product
from math import ceil
from typing import Any, Self

import numpy as np

from relax_core.api.algorithm import Source
from relax_core.api.batch import AttemptId, Ragged, RowBatch
from relax_core.api.bus import BusSettings, Issue
from relax_core.api.clock import SystemClock
from relax_core.api.errors import ConfigError
from relax_core.api.routing import ROUTES
from relax_core.api.weights import Version
from relax_core.bus.service import open_bus
from relax_core.bus.store import InProcessBus
from relax_core.config.compose import parse_config
from relax_core.config.run_config import RunConfig
from relax_core.control.planner import plan
from relax_core.control.prepare import Source as Layer, launch_of
from relax_core.registry.catalogue import Catalogue
from relax_core.rewards.scorer import ScoredSample
from relax_core.roles.rank_group import RankGroup
from relax_core.runners.context import RoleContext
from relax_core.runners.launch import Launch
from relax_core.runners.local.workers import LocalWorkers
from relax_core.runners.run_status import RunStatusService
from relax_core.sampling.inflight import InflightGroup
from relax_core.sampling.rollout_worker import RolloutWorker
from relax_core.sampling.rows import row_batch
from relax_core.weights.service import LocalWeightService

FIRST = 16
"""Sampled tokens in the first part of a sample; each later part ends at four times as many."""
MOST = 20.0
"""Of a log ratio, before its exponential."""


@dataclass(frozen=True, slots=True)
class Differences:
    """Of trainer - engine; sizes are absolute."""

    tokens: int
    mean: float
    p99: float
    """99 % of tokens are at most this far apart."""
    max: float
    k3_kl: float
    """KL of engine to trainer a token: the mean of exp(d) - 1 - d."""
    ratio_min: float
    ratio_max: float
    positions: tuple[tuple[int, float], ...] = ()
    """(end, mean) of tokens before that place of their sample, counted in sampled tokens, from the end before."""

    @classmethod
    def of(cls, rows: RowBatch, log_probs: Ragged) -> Self:
        """`log_probs` [tokens] of the same rows in the same order."""
        lengths, mask = rows.columns["tokens"].lengths, rows.columns["loss_mask"].values.astype(bool)
        apart = log_probs.values[mask].astype(np.float64) - rows.columns["rollout_log_probs"].values[mask]
        return cls.between(apart, _places(mask, lengths)[mask])

    @classmethod
    def between(cls, apart: np.ndarray, places: np.ndarray) -> Self:
        """Both [tokens]; at least one."""
        size, log = np.abs(apart), apart.clip(-MOST, MOST)
        ranked = np.sort(size)
        return cls(
            len(size), float(size.mean()), float(ranked[len(size) - 1 - int(len(size) * 0.01)]), float(size.max()),
            float((np.expm1(log) - log).mean()), float(np.exp(log.min())), float(np.exp(log.max())),
            tuple(_by_position(size, places)),
        )  # fmt: skip

    def plain(self) -> dict[str, Any]:
        """As JSON."""
        positions = [{"before": end, "mean": mean} for end, mean in self.positions]
        return {**asdict(self), "positions": positions}


def _places(mask: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Sampled tokens before each token of its row."""
    before = np.cumsum(mask) - mask
    starts = np.cumsum(lengths) - lengths
    return np.asarray(before - np.repeat(before[np.minimum(starts, len(before) - 1)], lengths))


def _by_position(size: np.ndarray, places: np.ndarray) -> list[tuple[int, float]]:
    found, start, end = [], 0, FIRST
    while start <= int(places.max()):
        part = size[(places >= start) & (places < end)]
        if len(part):
            found.append((end, float(part.mean())))
        start, end = end, end * 4
    return found


FORMATS = ("float32", "bfloat16", "float16")
EXPERTS, VALID = ROUTES


@dataclass(frozen=True, slots=True)
class Setting:
    """What is measured: number formats, and whether the trainer takes the engine's routes."""

    trainer: str
    engine: str
    replay: bool = False


@dataclass(frozen=True, slots=True)
class MismatchReport:
    """One setting, or why it can't be."""

    setting: Setting
    found: Differences | None
    refused: str = ""
    rerouted: float | None = None
    """Share of the tokens that were fed which the trainer, left to itself, sends to other experts in some layer."""


MakeWorkers = Callable[[Launch, Catalogue], Any]


async def mismatch(
    sources: Sequence[Layer], overrides: Sequence[str], num_samples: int, formats: Sequence[str] = (),
    make_workers: MakeWorkers | None = None,
) -> list[MismatchReport]:  # fmt: skip
    """The configuration as it is; or of each pair of `formats`, and with and without replay where its experts can be."""
    with tempfile.TemporaryDirectory(prefix="relax-mismatch-") as directory:
        launch, catalogue = launch_of(sources, overrides, directory)
        config = parse_config(launch.config, catalogue)
        if launch.plan.source is not Source.ROLLOUT:
            raise ConfigError(
                "algorithm.name", config.algorithm.name, "it samples nothing; name one that learns by doing"
            )
        bench = _Bench(launch, catalogue, config, make_workers or _processes)
        return await bench.run(list(_settings(bench, formats)), num_samples)


def _settings(bench: _Bench, formats: Sequence[str]) -> Iterator[Setting]:
    config = bench.config
    asked = config.model.routing_replay == "rollout"
    if not formats:
        yield Setting(config.model.dtype, config.engine_dtype, asked)
        return
    replays = (False, True) if bench.can_replay() else (False,)
    for trainer, engine, replay in product(formats, formats, replays):
        yield Setting(trainer, engine, replay)


class _Bench:
    """One configuration and its variants."""

    def __init__(self, launch: Launch, catalogue: Catalogue, config: RunConfig, make_workers: MakeWorkers) -> None:
        self.config = config
        self._launch, self._catalogue, self._make_workers = launch, catalogue, make_workers

    def can_replay(self) -> bool:
        try:
            self._variant(Setting(self.config.model.dtype, self.config.engine_dtype, True))
        except ConfigError:
            return False
        return True

    async def run(self, settings: Sequence[Setting], num_samples: int) -> list[MismatchReport]:
        able: dict[Setting, Launch] = {}
        refused: dict[Setting, str] = {}
        for setting in settings:
            try:
                able[setting] = self._variant(setting)
            except ConfigError as error:
                refused[setting] = str(error)
        if refused and not able:
            raise ConfigError("relax bench mismatch", next(iter(refused.values())), "none of the settings can run")
        rows = {engine: await self._rows(own, num_samples) for engine, own in _by(able, lambda one: one.engine).items()}
        found = {setting: MismatchReport(setting, None, why) for setting, why in refused.items()}
        for launch, own in _trainers(able):
            found |= {one.setting: one for one in await self._compared(launch, own, rows)}
        return [found[setting] for setting in settings]

    def _variant(self, setting: Setting) -> Launch:
        """The run with these formats. Raises ConfigError where it can't be planned."""
        replay = "rollout" if setting.replay else "off"
        model = self.config.model.model_copy(update={"dtype": setting.trainer, "routing_replay": replay})
        rollout = self.config.rollout.model_copy(update={"dtype": setting.engine})
        config = self.config.model_copy(update={"model": model, "rollout": rollout})
        return replace(self._launch, config=config.dump(), plan=plan(config, self._catalogue))

    # -- sampling -------------------------------------------------------------------------------------------------

    async def _rows(self, launch: Launch, num_samples: int) -> RowBatch:
        """Samples of the engines with the weights of the model's folder."""
        async with self._context("rollout", launch) as context:
            worker = await RolloutWorker.open(context, _ignore)
            try:
                return await _sampled(context, worker, num_samples)
            finally:
                await worker.close()

    # -- computing again ------------------------------------------------------------------------------------------

    async def _compared(
        self, launch: Launch, settings: Sequence[Setting], rows: Mapping[str, RowBatch]
    ) -> list[MismatchReport]:
        """What one trainer makes of the samples of each engine."""
        async with self._context("actor", launch) as context:
            trainer = await RankGroup.start(context, "actor")
            try:
                return [await _measured(trainer, rows[setting.engine], setting) for setting in settings]
            finally:
                await trainer.stop()

    @asynccontextmanager
    async def _context(self, role: str, launch: Launch) -> AsyncIterator[RoleContext]:
        """A role alone: its workers end with it, so that engine and trainer never lie in memory together."""
        clock, workers = SystemClock(), self._make_workers(launch, self._catalogue)
        size = int(launch.config["rollout"]["group_size"])
        bus = await open_bus(InProcessBus(), BusSettings(size, 1, 0), launch.run_dir, Version("actor", 0, 0))
        context = RoleContext(
            role,
            launch,
            self._catalogue,
            bus,
            LocalWeightService(clock),
            RunStatusService(clock),
            workers,
            workers,
            clock,
            0,
        )
        try:
            yield context
        finally:
            await workers.close()
            await bus.close()


async def _sampled(context: RoleContext, worker: RolloutWorker, num_samples: int) -> RowBatch:
    size, at_once = context.plan.group_size, int(context.config.rollout.prompts_per_step)
    numbers = range(ceil(num_samples / size))
    issues = [Issue(number, tuple(AttemptId(number, sample, 0) for sample in range(size))) for number in numbers]
    groups: list[InflightGroup] = []
    for first in range(0, len(issues), at_once):
        made = (worker.make(issue, worker.pool.newest()) for issue in issues[first : first + at_once])
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


async def _measured(trainer: RankGroup, rows: RowBatch, setting: Setting) -> MismatchReport:
    own = {name: column for name, column in rows.columns.items() if name not in ROUTES}
    asks, given = ("log_probs",), RowBatch(rows.ids, own)
    if EXPERTS not in rows.columns:
        return MismatchReport(setting, Differences.of(rows, (await trainer.forward(given, asks))["log_probs"]))
    free = await trainer.forward(given, (*asks, EXPERTS))
    said = await trainer.forward(rows, asks) if setting.replay else free
    return MismatchReport(setting, Differences.of(rows, said["log_probs"]), rerouted=_rerouted(rows, free[EXPERTS]))


def _rerouted(rows: RowBatch, own: Ragged) -> float:
    engine, known = rows.columns[EXPERTS].values, rows.columns[VALID].values.astype(bool)
    fed = known.copy()
    fed[np.cumsum(rows.columns["tokens"].lengths) - 1] = False  # a row's last token is sampled, and never fed
    other = (np.sort(engine, axis=-1) != np.sort(own.values, axis=-1)).any(axis=(1, 2))
    return float(other[fed].mean()) if fed.any() else 0.0


def _by(settings: Mapping[Setting, Launch], key: Callable[[Setting], str]) -> dict[str, Launch]:
    """A launch for each key: of all with one key, the last, which is one with replay where there is any."""
    return {key(setting): launch for setting, launch in settings.items()}


def _trainers(settings: Mapping[Setting, Launch]) -> Iterator[tuple[Launch, list[Setting]]]:
    """Each format's trainer with what it is asked for."""
    for dtype, launch in _by(settings, lambda one: one.trainer).items():
        yield launch, [setting for setting in settings if setting.trainer == dtype]


def _processes(launch: Launch, _: Catalogue) -> LocalWorkers:
    return LocalWorkers(launch.plugin_files, launch.resolved, None, SystemClock())


async def _ignore(*_: Any) -> None:
    """There is nobody to tell."""
