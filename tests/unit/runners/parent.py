# SPDX-License-Identifier: Apache-2.0
"""A parent to be killed: starts a worker with a child of its own, prints the ids of all its processes and waits.

Arguments are modules to preload: then the worker is forked from a process that has them; `untrusted` makes it so."""

from __future__ import annotations

import asyncio
import os
import sys

import psutil

from relax_core.api.component import Chosen
from relax_core.api.role import WorkerSpec
from relax_core.runners.local.workers import LocalWorkers


async def main() -> None:
    env, words = {"PYTHONPATH": os.getcwd()}, sys.argv[1:]
    preload, untrusted = tuple(word for word in words if word != "untrusted"), "untrusted" in words
    target = "tests.unit.runners.hosted:Hosted"
    spec = WorkerSpec("w", Chosen("role", "w"), env=env, target=target, preload=preload, untrusted=untrusted)
    (worker,) = await LocalWorkers().start([spec])
    await worker.call("grandchild", timeout_s=60)
    started = psutil.Process(worker.pid).children(recursive=True)  # authors' code sees other numbers
    print(worker.pid, *(child.pid for child in started), flush=True)
    await asyncio.sleep(600)


asyncio.run(main())
