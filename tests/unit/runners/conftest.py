# SPDX-License-Identifier: Apache-2.0
"""A role's context whose bus, weights and workers are not touched, over a real run status in virtual time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from relax_core.api.weights import Version
from relax_core.bus.service import open_bus
from relax_core.bus.store import InProcessBus
from relax_core.config.compose import compose
from relax_core.control.planner import plan
from relax_core.registry.catalogue import Catalogue
from relax_core.runners.context import RoleContext
from relax_core.runners.launch import Launch, bus_settings
from relax_core.runners.local.workers import LocalWorkers
from relax_core.runners.run_status import RunStatusService
from relax_core.weights.registry import WeightRegistry
from tests.unit.roles.virtual_time import VirtualClock

MakeContext = Callable[[int], RoleContext]
Backstage = Callable[..., Any]


@pytest.fixture(scope="session")
def catalogue() -> Catalogue:
    return Catalogue.load()


@pytest.fixture
def backstage(tmp_path: Path, catalogue: Catalogue) -> Backstage:
    """Awaited inside the virtual loop: a run status, and what makes contexts of one role over it."""
    settings = {"model": {"path": str(tmp_path)}, "data": {"train": str(tmp_path / "t.jsonl")}, "algorithm": "grpo",
                "engine": "transformers", "trainer": "torch", "rewards": ["exact"]}  # fmt: skip
    config = compose([settings], (), catalogue, on_disk=False).config
    launch = Launch("run", str(tmp_path), config.dump(), plan(config, catalogue))

    async def open_(role: str) -> tuple[RunStatusService, MakeContext]:
        clock = VirtualClock()
        bus = await open_bus(InProcessBus(), bus_settings(launch), launch.run_dir, Version("actor", 0, 0), clock)
        run_status, workers = RunStatusService(clock), LocalWorkers()
        return run_status, lambda registration: RoleContext(
            role, launch, catalogue, bus, WeightRegistry(clock), run_status, workers, workers, clock, registration
        )

    return open_
