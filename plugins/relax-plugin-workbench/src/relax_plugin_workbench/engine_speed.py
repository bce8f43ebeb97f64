# SPDX-License-Identifier: Apache-2.0
"""The speed of several settings of the policy's engines on this machine, with the tasks and lengths of a configuration.

A round plays the groups of one step, from the rendered prompts to the last token, as a run's rollout does; nothing is
scored or trained. Settings run one after another, each in processes of its own.
"""

from __future__ import annotations

import asyncio
import shlex
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from relax_core.api.algorithm import Source
from relax_core.api.errors import ConfigError, RelaxError
from relax_core.config.layers import Source as Layer
from relax_core.launch import Catalogue, Launch, plan_run
from relax_core.sampling.rollout_worker import RolloutWorker
from relax_plugin_workbench.single_role import first_attempts, ignore, single_role, try_launch


@dataclass(frozen=True, slots=True)
class Round:
    """The measurements of one round."""

    seconds: float
    tokens: int
    """Number of sampled tokens."""
    failed: int
    """Number of samples that an engine or an environment failed."""


@dataclass(frozen=True, slots=True)
class EngineSpeed:
    """Measurements of one setting, or the reason why the setting can't run."""

    setting: str
    """Overrides that are added to the configuration, as on the command line."""
    refused: str = ""
    start_s: float = 0.0
    """Seconds until engines and environments were ready."""
    rounds: tuple[Round, ...] = ()
    memory_bytes: int = 0
    """Resident memory of the engines' processes after the rounds; 0: unknown, since the engines run elsewhere or inline."""
    prefix_hits: float | None = None
    """Share of the prompt tokens that engines found in their prefix caches; None: not counted."""

    @property
    def title(self) -> str:
        return self.setting or "as configured"

    @property
    def tokens_per_s(self) -> float:
        """Sampled tokens per second over all rounds; 0 if the setting can't run."""
        seconds = sum(one.seconds for one in self.rounds)
        return sum(one.tokens for one in self.rounds) / seconds if seconds else 0.0

    @property
    def round_s(self) -> float:
        """Median seconds of a round."""
        return statistics.median(one.seconds for one in self.rounds)

    @property
    def failed(self) -> int:
        return sum(one.failed for one in self.rounds)

    def plain(self) -> dict[str, object]:
        """Return the measurements as plain data for JSON."""
        if self.refused:
            return {"setting": self.setting, "refused": self.refused}
        return {
            "setting": self.setting, "tokens_per_s": self.tokens_per_s, "round_s": [one.seconds for one in self.rounds],
            "tokens": [one.tokens for one in self.rounds], "failed": self.failed, "start_s": self.start_s,
            "memory_bytes": self.memory_bytes, "prefix_hits": self.prefix_hits,
        }  # fmt: skip


async def engine_speeds(
    sources: Sequence[Layer], overrides: Sequence[str], settings: Sequence[str], num_rounds: int
) -> list[EngineSpeed]:
    """Return the speeds of settings, fastest first; settings that can't run come last.

    `settings`: overrides for each, as on a command line; empty: each installed engine, and the configured engine with
    its own options. A first round warms caches and is not measured. Raises ConfigError if no setting can run.
    """
    with tempfile.TemporaryDirectory(prefix="relax-engines-") as directory:
        planned = plan_run(sources, overrides)
        sources = planned.built_sources(Path(directory), sources)
        configured = planned.stages[0].config.engine.name
        installed = ("" if name == configured else f"engine={name}" for name in planned.catalogue.names("engine"))
        speeds = [await _measured(sources, overrides, setting, num_rounds) for setting in settings or installed]
    if all(speed.refused for speed in speeds):
        got = "; ".join(f"{speed.title}: {speed.refused}" for speed in speeds)
        raise ConfigError("relax bench engines", got, "no setting can run; change the settings")
    return sorted(speeds, key=lambda speed: -speed.tokens_per_s)


async def _measured(sources: Sequence[Layer], overrides: Sequence[str], setting: str, num_rounds: int) -> EngineSpeed:
    with tempfile.TemporaryDirectory(prefix="relax-engines-") as directory:
        try:
            _, launch, catalogue = try_launch(sources, [*overrides, *shlex.split(setting)], Path(directory))
            if launch.plan.source is not Source.ROLLOUT:
                fix = "the algorithm samples nothing; choose one that learns from samples"
                raise ConfigError("algorithm.name", launch.config["algorithm"]["name"], fix)
            return await _played(launch, catalogue, setting, num_rounds)
        except RelaxError as error:
            return EngineSpeed(setting, str(error))


async def _played(launch: Launch, catalogue: Catalogue, setting: str, num_rounds: int) -> EngineSpeed:
    async with single_role("rollout", launch, catalogue) as context:
        now = context.clock.now
        began = now()
        worker = await RolloutWorker.open(context, ignore)
        try:
            start_s = now() - began
            size, count = context.plan.group_size, context.config.rollout.groups_per_step
            await _round(worker, size, count, 0, now)
            before = worker.pool.queue()
            rounds = [await _round(worker, size, count, number, now) for number in range(1, num_rounds + 1)]
            after = worker.pool.queue()
            prompt, cached = (after[name] - before[name] for name in ("prompt_tokens", "cached_tokens"))
            hits = cached / prompt if prompt else None
            processes = {engine["pid"] for engine in worker.pool.facts().values()} - {0}
            inline = context.config.run.runner == "inline"
            memory = 0 if inline else sum(map(_memory, processes))
            return EngineSpeed(setting, "", start_s, tuple(rounds), memory, hits)
        finally:
            await worker.close()


async def _round(worker: RolloutWorker, group_size: int, num_groups: int, number: int, now: Any) -> Round:
    """Play the groups of step `number` together."""
    groups = range(number * num_groups, (number + 1) * num_groups)
    issues = [first_attempts(group, group_size) for group in groups]
    began = now()
    made = await asyncio.gather(*(worker.make(issue, worker.engines.newest()) for issue in issues))
    seconds = now() - began
    samples = [sample for group in made for sample in group.trajectories]
    tokens = sum(len(node.tokens) for sample in samples for node in sample.forest if node.sampled)
    return Round(seconds, tokens, sum(not sample.outcome.judged for sample in samples))


def _memory(pid: int) -> int:
    """Return the resident memory of a process and its children in bytes; 0 if the process has ended."""
    try:
        process = psutil.Process(pid)
        return sum(each.memory_info().rss for each in (process, *process.children(recursive=True)))
    except psutil.Error:
        return 0
