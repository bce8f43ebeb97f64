# SPDX-License-Identifier: Apache-2.0
"""`relax rollout`: sample and score tasks without training, and keep all samples in a folder.

The policy's engines, rewards and environments are those of training, with the same seeds as a run's first steps.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal

from relax_core.api.errors import ConfigError
from relax_core.api.options import revealed
from relax_core.cli.terminal import run_to_end
from relax_core.config.layers import Source
from relax_core.launch import Catalogue, Launch, RunConfig, make_launch, plan, plan_run
from relax_core.runs import Redactor, check_new_folder, disk_errors, to_toml, write_text
from relax_core.sampling.rollout_worker import RolloutWorker
from relax_core.sampling.rows import records
from relax_plugin_workbench.sample_file import SampleFile
from relax_plugin_workbench.sample_parquet import check_pyarrow, write_parquet
from relax_plugin_workbench.single_role import first_attempts, ignore, single_role
from relax_plugin_workbench.try_run import played_facts

CONFIG, SAMPLES, TABLE = "config.toml", "samples.jsonl", "samples.parquet"
SampleFormat = Literal["jsonl", "parquet"]


@dataclass(frozen=True, slots=True)
class RolloutResult:
    """All samples of a folder."""

    directory: Path
    tasks: int
    """Number of tasks with samples; a task that the sampler picks again counts again."""
    added: int
    """Number of these tasks that this call added."""
    judged: int
    """Number of samples with a reward."""
    failed: int
    """Number of samples without a reward."""
    mean: float | None
    """Mean reward of the judged samples; None if no sample was judged."""
    file: Path
    """File with all samples, in the format that was asked for."""


def rollout(
    sources: Sequence[Source], overrides: Sequence[str], tasks: int, out: Path, file_format: SampleFormat = "jsonl"
) -> RolloutResult:
    """Sample and score until the folder `out` has the samples of `tasks` tasks; continue the folder if it has some.

    With the format `parquet`, the folder then also has a table of all samples. The table is removed before samples are
    added, so it never lacks any. Filters of samples have no effect. Raises ConfigError if the folder holds other files,
    or samples of another configuration.
    """
    if file_format == "parquet":
        check_pyarrow()
    planned = plan_run(sources, overrides)
    if planned.recipe is not None or planned.composed.stages:
        got = "stages" if planned.composed.stages else "the name of a recipe"
        raise ConfigError("relax rollout", got, "give the TOML file of one run; `relax init` writes one")
    config, out = planned.composed.config.model_copy(update={"filters": (), "sinks": ()}), out.absolute()
    redactor = Redactor(revealed(config.dump()))
    _open_folder(out, redactor.known(to_toml(config.dump())))
    file = SampleFile(out / SAMPLES, config.rollout.group_size, redactor)
    try:
        missing = [group for group in range(tasks) if group not in file.groups]
        if missing:
            with disk_errors(out):
                (out / TABLE).unlink(missing_ok=True)
            began = datetime.fromtimestamp((out / CONFIG).stat().st_mtime)  # a continued folder shows one date
            with tempfile.TemporaryDirectory(prefix="relax-rollout-") as scratch:
                catalogue = planned.catalogue
                launch = make_launch(config, plan(config, catalogue), catalogue, Path(scratch), began=began)
                run_to_end(_sample_groups(launch, catalogue, config, missing, file))
        if file_format == "parquet":
            write_parquet(out / SAMPLES, out / TABLE)
    finally:
        file.close()
    written = out / (TABLE if file_format == "parquet" else SAMPLES)
    return RolloutResult(out, len(file.groups), len(missing), file.num_judged, file.num_failed, file.mean, written)


def _open_folder(out: Path, config: str) -> None:
    """Create the folder with its configuration, or check that its samples have the same configuration."""
    kept = out / CONFIG
    if not kept.is_file():
        check_new_folder(out)
        with disk_errors(out):
            out.mkdir(parents=True, exist_ok=True)
        write_text(kept, config)
        return
    with disk_errors(kept):
        lines = kept.read_text(encoding="utf-8", errors="replace").splitlines()
    differing = [line for line in config.splitlines() if line not in set(lines)]
    if config.splitlines() != lines:
        got = f"{out}, whose samples have another configuration"
        now = f": now {differing[0]}" if differing else ""
        raise ConfigError("--out", f"{got}{now}", "name a new folder, or give the same files and overrides")


async def _sample_groups(
    launch: Launch, catalogue: Catalogue, config: RunConfig, groups: Sequence[int], file: SampleFile
) -> None:
    """Sample `rollout.groups_per_step` groups at a time, and append each group when it is scored."""
    async with single_role("rollout", launch, catalogue) as context:
        worker = await RolloutWorker.open(context, ignore)
        left = iter(groups)
        tasks = [
            asyncio.create_task(_sample_each(worker, config.rollout.group_size, left, file))
            for _ in range(min(config.rollout.groups_per_step, len(groups)))
        ]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await worker.close()


async def _sample_each(worker: RolloutWorker, size: int, left: Iterator[int], file: SampleFile) -> None:
    for number in left:
        group = await worker.make(first_attempts(number, size), worker.engines.newest())
        scored = await worker.score([group])
        played = (sample for one in scored for _, sample, _ in one.samples)
        pairs = zip(records(scored), played, strict=True)
        file.append(tuple({**record, **played_facts(sample, worker.family)} for record, sample in pairs))
