# SPDX-License-Identifier: Apache-2.0
"""A trial: a few tasks generated and judged exactly as training would, without a trainer and without a run directory.

Scores written responses with one reward, in the same killable process that training would use.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from relax_core.api.batch import AttemptId
from relax_core.api.bus import BusSettings, Issue
from relax_core.api.clock import SystemClock
from relax_core.api.errors import ConfigError
from relax_core.api.task import Message, Task
from relax_core.api.trainer import Chosen
from relax_core.api.trajectory import Trajectory
from relax_core.api.weights import Version
from relax_core.bus.service import open_bus
from relax_core.bus.store import InProcessBus
from relax_core.config.layers import parse_override, plugin_files
from relax_core.control.prepare import Source, launch_of
from relax_core.registry.catalogue import Catalogue
from relax_core.rewards.scorer import RewardScorer, RewardSettings
from relax_core.runners.context import RoleContext
from relax_core.runners.local.workers import LocalWorkers
from relax_core.runners.run_status import RunStatusService
from relax_core.sampling.rollout_worker import RolloutWorker
from relax_core.sampling.rows import records, sample_record
from relax_core.weights.service import LocalWeightService


async def trial(sources: Sequence[Source], overrides: Sequence[str], num_tasks: int) -> tuple[dict[str, Any], ...]:
    """Records of `num_tasks` groups of samples, as the run directory would hold them."""
    clock = SystemClock()
    with tempfile.TemporaryDirectory(prefix="relax-try-") as directory:
        launch, catalogue = launch_of(sources, overrides, directory)
        workers = LocalWorkers(launch.plugin_files, launch.resolved, None, clock)
        group_size = int(launch.config["rollout"]["group_size"])
        bus = await open_bus(InProcessBus(), BusSettings(group_size, num_tasks, 0), directory, Version("actor", 0, 0))
        context = RoleContext(
            "rollout",
            launch,
            catalogue,
            bus,
            LocalWeightService(clock),
            RunStatusService(clock),
            workers,
            workers,
            clock,
            0,
        )
        try:
            return await _sample(await RolloutWorker.open(context, _ignore), num_tasks, group_size)
        finally:
            await workers.close()
            await bus.close()


async def _sample(worker: RolloutWorker, num_tasks: int, group_size: int) -> tuple[dict[str, Any], ...]:
    issues = [Issue(g, tuple(AttemptId(g, sample, 0) for sample in range(group_size))) for g in range(num_tasks)]
    try:
        groups = [await worker.make(issue, worker.pool.newest()) for issue in issues]
        return records(await worker.score(groups))
    finally:
        await worker.close()


async def _ignore(*_: Any) -> None:
    """A trial has nobody to tell; an engine that fails shows in the samples' outcomes."""


async def reward_trial(name: str, options: Sequence[str], data: Path, plugins: Sequence[str]) -> list[dict[str, Any]]:
    """One record a row of `data`: JSON lines with `prompt`, `response` and what the reward reads."""
    plugins = plugins or _plugins_beside(data)
    chosen = Chosen("reward", name, {".".join(o.path): o.value for o in map(parse_override, options)})
    Catalogue.load(plugins).build(chosen)
    workers = LocalWorkers(plugins)
    scorer = RewardScorer([RewardSettings(chosen)], workers, SystemClock())
    rows = list(_rows(data))
    try:
        await scorer.start()
        judged = await scorer.score([(task, (trajectory,)) for task, trajectory in rows])
    finally:
        await scorer.stop()
        await workers.close()
    return [sample_record(task, trajectory, one[0]) for (task, trajectory), one in zip(rows, judged, strict=True)]


def _plugins_beside(data: Path) -> Sequence[str]:
    """A failing sample lies in a run's folder, whose configuration names the plugin files that the reward may be in."""
    config = data.parent / "config.toml"
    return plugin_files([config]) if config.is_file() else ()


def _rows(data: Path) -> Iterator[tuple[Task, Trajectory]]:
    try:
        text = data.read_text()
    except OSError as error:
        raise ConfigError("--data", data, f"it can't be read ({error.strerror}); name a JSON lines file") from error
    lines = [text] if data.suffix == ".json" else text.splitlines()
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield _row(line, f"{data}:{number}")


def _row(line: str, where: str) -> tuple[Task, Trajectory]:
    try:
        row = json.loads(line)
        row = {**row, **row.pop("task")} if isinstance(row.get("task"), dict) else row
        prompt, response = row.pop("prompt"), row.pop("response")
    except (ValueError, KeyError, AttributeError) as error:
        raise ConfigError("--data", where, f"each row is a JSON object with prompt and response ({error})") from error
    asked = (
        (Message("user", prompt),)
        if isinstance(prompt, str)
        else tuple(Message(m["role"], m["content"]) for m in prompt)
    )
    task = Task(str(row.pop("id", where)), prompt if isinstance(prompt, str) else asked, row.pop("answer", None), row)
    return task, Trajectory((*asked, Message("assistant", response)), response, ())
