# SPDX-License-Identifier: Apache-2.0
"""A parent to be killed: starts a worker with a child of its own, prints both process ids and waits."""

from __future__ import annotations

import asyncio
import os

from relax_core.api.component import Chosen
from relax_core.api.role import WorkerSpec
from relax_core.runners.local.workers import LocalWorkers


async def main() -> None:
    spec = WorkerSpec(
        "w", Chosen("role", "w"), env={"PYTHONPATH": os.getcwd()}, target="tests.unit.runners.hosted:Hosted"
    )
    (worker,) = await LocalWorkers().start([spec])
    print(worker.pid, await worker.call("grandchild", timeout_s=60), flush=True)
    await asyncio.sleep(600)


asyncio.run(main())
