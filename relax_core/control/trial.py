# SPDX-License-Identifier: Apache-2.0
"""A trial: a few tasks generated and judged exactly as training would, without a trainer and without a run directory."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from typing import Any

from relax_core.api.batch import AttemptId
from relax_core.api.bus import BusSettings, Issue
from relax_core.api.clock import SystemClock
from relax_core.api.version import Version
from relax_core.bus.in_process import InProcessBus
from relax_core.bus.opening import open_bus
from relax_core.control.prepare import Source, launch_of
from relax_core.rollout.producer import Producer
from relax_core.rollout.sample_record import records
from relax_core.runners.board import BoardService
from relax_core.runners.context import RoleContext
from relax_core.runners.local.workers import LocalWorkers
from relax_core.weights.service import WeightBoard


async def trial(sources: Sequence[Source], overrides: Sequence[str], num_tasks: int) -> tuple[dict[str, Any], ...]:
    """Records of `num_tasks` groups of samples, as the run directory would hold them."""
    clock = SystemClock()
    with tempfile.TemporaryDirectory(prefix="relax-try-") as directory:
        launch, catalogue = launch_of(sources, overrides, directory)
        workers = LocalWorkers(launch.plugin_files, launch.resolved, None, clock)
        group_size = int(launch.config["rollout"]["group_size"])
        bus = await open_bus(InProcessBus(), BusSettings(group_size, num_tasks, 0), directory, Version("actor", 0, 0))
        context = RoleContext(
            "rollout", launch, catalogue, bus, WeightBoard(clock), BoardService(clock), workers, workers, clock, 0
        )
        try:
            return await _sample(await Producer.open(context, _ignore), num_tasks, group_size)
        finally:
            await workers.close()
            await bus.close()


async def _sample(producer: Producer, num_tasks: int, group_size: int) -> tuple[dict[str, Any], ...]:
    issues = [Issue(g, tuple(AttemptId(g, sample, 0) for sample in range(group_size))) for g in range(num_tasks)]
    try:
        groups = [await producer.make(issue, producer.version()) for issue in issues]
        return records(await producer.judge(groups))
    finally:
        await producer.close()


async def _ignore(*_: Any) -> None:
    """A trial has nobody to tell; an engine that fails shows in the samples' outcomes."""
