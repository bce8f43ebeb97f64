# SPDX-License-Identifier: Apache-2.0
"""An environment in a process of its own, started and stopped as a run does it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from relax_core.api import Chosen
from relax_core.config.run_config import EnvironmentChoice
from relax_core.registry.catalogue import Catalogue
from relax_core.rpc.isolated_pool import ProcessStarter
from relax_core.runners.local.workers import LocalWorkers
from relax_core.sampling.environments import EnvironmentPool


@asynccontextmanager
async def environment_pool(
    name: str, options: Mapping[str, Any], timeout_s: float = 60.0, plugins: Sequence[str] = ()
) -> AsyncIterator[EnvironmentPool]:
    """Start the pool of an environment; stop the pool and its processes at the end."""
    workers = LocalWorkers(plugins)
    choice = EnvironmentChoice(chosen=Chosen("environment", name, options), timeout_s=timeout_s)
    pool = EnvironmentPool(choice, ProcessStarter(workers), build=Catalogue.load(plugins).build)
    try:
        await pool.start()
        yield pool
        await pool.stop()
    finally:
        await workers.close()
