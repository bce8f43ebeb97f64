# SPDX-License-Identifier: Apache-2.0
"""Worker groups on Ray keep what `api.role` promises: errors and their frames, deadlines, deaths, interpreters."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import numpy as np
import psutil
import pytest

from relax_core.api.component import Chosen
from relax_core.api.errors import DeadlineExceeded, InfrastructureError, PluginError, WorkerDied
from relax_core.api.plan import Plan
from relax_core.api.role import Worker, WorkerSpec
from relax_core.registry.catalogue import Catalogue
from relax_core.runners.launch import Launch
from tests.processes import gone

pytestmark = pytest.mark.ray
CALL_S = 60.0
Start = Callable[..., Any]


def spec(name: str, python: str = "", **env: str) -> WorkerSpec:
    env = {"PYTHONPATH": os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")]), **env}
    return WorkerSpec(name, Chosen("role", name), python, env, target="tests.unit.runners.hosted:Hosted")


def launch(number: int = 0, plugins: Any = ()) -> Launch:
    return Launch(f"test-{os.getpid()}-{number}", "", {}, Plan("hybrid", (), (), {}, ()), (), plugins)


async def test_the_handle_of_a_replaced_worker_is_dropped(joined: None) -> None:
    from relax_core.runners.ray.workers import RayWorkers

    resolved = tuple(tuple(plugin) for plugin in Catalogue.load().resolved)
    workers = RayWorkers(launch(70, resolved), "rollout", 1)
    for _ in range(2):
        (worker,) = await workers.start([spec("engine-0")], CALL_S)
        assert workers._started == [worker]
        await worker.kill()
    await workers.start([spec("engine-0")], CALL_S)
    await workers.close()
    assert workers._started == []


@pytest.fixture
async def begin(joined: None) -> AsyncIterator[Start]:
    """Starts workers of one run; they end with the test."""
    from relax_core.runners.ray.workers import RayWorkers

    resolved = tuple(tuple(plugin) for plugin in Catalogue.load().resolved)
    started: list[Worker] = []

    async def start(*specs: WorkerSpec, plugins: Any = resolved) -> Any:
        workers = await RayWorkers(launch(len(started), plugins), "rollout", 1).start(specs, CALL_S)
        started.extend(workers)
        return workers

    yield start
    for worker in started:
        await worker.kill()


async def test_workers_answer_stream_and_fail_as_their_methods_do(begin: Start) -> None:
    one, two = await begin(spec("one"), spec("two"))
    assert one.pid != two.pid and {one.pid, two.pid}.isdisjoint({os.getpid()})
    doubled = await one.call("double", np.arange(3), timeout_s=CALL_S)
    assert doubled.tolist() == [0, 2, 4]
    assert [item async for item in two.stream("count", 3, timeout_s=CALL_S)] == [0, 1, 2]
    with pytest.raises(ValueError, match="got 3; give 4"):
        await one.call("refuse", timeout_s=CALL_S)
    with pytest.raises(PluginError, match="author's mistake") as failed:
        await one.call("fail", timeout_s=CALL_S)
    assert "hosted.py" in failed.value.frames
    got = []
    with pytest.raises(ValueError, match="no more"):
        async for item in one.stream("count_then_fail", timeout_s=CALL_S):
            got.append(item)
    assert got == [0]


async def test_a_killed_worker_is_distinguished_from_a_late_one(begin: Start) -> None:
    (worker,) = await begin(spec("w"))
    with pytest.raises(DeadlineExceeded, match="w waited"):
        await worker.call("spin", timeout_s=0.3)
    spinning = asyncio.create_task(worker.call("spin", timeout_s=CALL_S))
    await asyncio.sleep(0)
    os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(WorkerDied, match="w .*died during spin"):
        await spinning
    with pytest.raises(WorkerDied):
        [item async for item in worker.stream("count", 3, timeout_s=CALL_S)]


async def test_another_interpreter_is_a_child_that_dies_with_its_actor(begin: Start) -> None:
    (worker,) = await begin(spec("other", python=sys.executable))
    child = psutil.Process(worker.pid)
    assert "relax_core.runners.local.child" in " ".join(child.cmdline())
    assert (await worker.call("double", np.arange(2), timeout_s=CALL_S)).tolist() == [0, 2]
    assert [item async for item in worker.stream("count", 2, timeout_s=CALL_S)] == [0, 1]
    await worker.kill()
    await asyncio.to_thread(psutil.wait_procs, [child], 60)
    assert gone(child.pid)


async def test_no_placement_group_stays_of_workers_that_did_not_start(begin: Start) -> None:
    """They had no room in time, were refused, or whoever started them was cancelled."""
    from ray.util import placement_group_table

    from relax_core.runners.ray.workers import RayWorkers

    def groups() -> set[str]:
        return {name for name, known in placement_group_table().items() if known["state"] != "REMOVED"}

    before = groups()
    huge = replace(spec("huge"), num_gpus=1000.0)
    with pytest.raises(DeadlineExceeded, match="room for huge"):
        await RayWorkers(launch(), "rollout", 1).start([huge], 0.5)
    with pytest.raises(InfrastructureError, match="install the same plugins"):
        await begin(spec("w"), plugins=(("relax-core", "9.9.9", ""),))
    workers = RayWorkers(launch(), "rollout", 2)
    starting = asyncio.create_task(workers.start([spec("v"), replace(huge, name="x")], CALL_S))
    async with asyncio.timeout(CALL_S):
        while groups() <= before:
            await asyncio.sleep(0.05)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    async with asyncio.timeout(CALL_S):
        while groups() - before:
            await asyncio.sleep(0.05)


@pytest.mark.faults  # kills a driver, and waits for a cluster's notice
async def test_workers_end_with_the_process_that_started_them(joined: None) -> None:
    """A role's process may be killed: Ray ends its workers."""
    import ray

    @ray.remote(num_cpus=0, max_restarts=0)  # type: ignore[misc]
    class Owner:
        async def begin(self, own: Launch, one: WorkerSpec) -> tuple[int, int]:
            from relax_core.runners.ray.workers import RayWorkers

            (worker,) = await RayWorkers(own, "rollout", 1).start([one], CALL_S)
            return os.getpid(), worker.pid

    resolved = tuple(tuple(plugin) for plugin in Catalogue.load().resolved)
    env = {"env_vars": {"PYTHONPATH": os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])}}
    owner = Owner.options(runtime_env=env).remote()
    pid, worker = await owner.begin.remote(launch(60, resolved), spec("engine-0"))
    os.kill(pid, signal.SIGKILL)
    await _ended(worker)


async def _ended(pid: int) -> None:
    """Wait until a process is gone; a stopped one would hold its devices."""
    async with asyncio.timeout(CALL_S):
        while not gone(pid):
            await asyncio.sleep(0.05)
