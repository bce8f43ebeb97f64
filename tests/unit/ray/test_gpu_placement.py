# SPDX-License-Identifier: Apache-2.0
"""Processes that the plan puts on one GPU are on one GPU of the cluster, and only those. The cluster's GPUs are a pretence."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest

from relax_core.api.component import Chosen
from relax_core.api.errors import ConfigError
from relax_core.api.plan import Plan, WorkerGroup
from relax_core.api.role import WorkerSpec
from relax_core.registry.catalogue import Catalogue
from relax_core.runners.launch import Launch

pytestmark = pytest.mark.ray
CALL_S = 60.0
TWO = frozenset({"gpu:0", "gpu:1"})


def plan(**groups: tuple[int, frozenset[str]]) -> Plan:
    return Plan("", (), (), {name: WorkerGroup(name, size, devices=on) for name, (size, on) in groups.items()}, ())


SHARED = plan(actor=(2, TWO), rollout=(2, TWO), reference=(1, frozenset({"gpu:0"})))


def specs(made: Plan, role: str) -> list[WorkerSpec]:
    group, env = made.groups[role], {"PYTHONPATH": os.getcwd()}
    device_sets = [group.process_devices(number) for number in range(group.size)]
    return [
        WorkerSpec(f"{role}-{number}", Chosen("role", role), env=env, devices=own, num_gpus=made.num_gpus(own),
                   target="tests.unit.runners.hosted:Hosted")
        for number, own in enumerate(device_sets)
    ]  # fmt: skip


@pytest.fixture
async def shown(joined: None) -> AsyncIterator[Any]:
    """What every worker of a plan sees."""
    from ray.util.placement_group import remove_placement_group

    from relax_core.runners.ray.workers import GpuPlacement, RayWorkers

    started: list[Any] = []
    placements: list[Any] = []

    async def start(made: Plan) -> Mapping[str, str]:
        placements.append(GpuPlacement.request(made))
        resolved = tuple(tuple(plugin) for plugin in Catalogue.load().resolved())
        workers = RayWorkers(
            Launch(f"placement-{os.getpid()}", "", {}, made, (), resolved), "rollout", 1, placements[0]
        )
        for role in made.groups:
            started.extend(await workers.start(specs(made, role), CALL_S))
        seen = await asyncio.gather(
            *(one.call("variable", "CUDA_VISIBLE_DEVICES", timeout_s=CALL_S) for one in started)
        )
        assert len({one.host for one in started}) == 1
        assert await started[0].free_port(started[0].host) > 0
        return {one.name: words for one, words in zip(started, seen, strict=True)}

    yield start
    for worker in started:
        await worker.kill()
    for placement in placements:
        remove_placement_group(placement.group)


async def test_who_shares_a_gpu_sees_the_same_one(shown: Any) -> None:
    seen = await shown(SHARED)
    assert seen["actor-0"] == seen["rollout-0"] == seen["reference-0"] != seen["actor-1"] == seen["rollout-1"]
    assert all(len(devices.split(",")) == 1 and devices for devices in seen.values())


async def test_an_engine_of_two_gpus_has_both_for_itself(shown: Any) -> None:
    seen = await shown(plan(actor=(1, frozenset({"gpu:0"})), rollout=(1, frozenset({"gpu:1", "gpu:2"}))))
    assert len(seen["rollout-0"].split(",")) == 2
    assert set(seen["rollout-0"].split(",")).isdisjoint(seen["actor-0"].split(","))


def test_what_ray_can_not_share_is_refused_before_anything_starts() -> None:
    from relax_core.runners.ray.workers import gpu_sets, ray_share

    assert gpu_sets(SHARED) == (("gpu:0",), ("gpu:1",))
    assert 3 * ray_share(SHARED.num_gpus(("gpu:0",))) <= 1
    assert gpu_sets(plan(actor=(1, frozenset({"cpu:0"})))) == ()
    with pytest.raises(ConfigError, match="gpu:0, gpu:1 of one process, shared with more processes"):
        gpu_sets(plan(actor=(2, TWO), rollout=(1, TWO)))
