# SPDX-License-Identifier: Apache-2.0
"""Processes that the plan puts on one GPU are on one GPU of the cluster, and only those. The cluster's GPUs are a pretence."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from typing import Any

import pytest

from relax_core.api.component import Chosen
from relax_core.api.errors import ConfigError, DeadlineExceeded
from relax_core.api.plan import Plan, WorkerGroup
from relax_core.api.role import WorkerSpec
from relax_core.registry.catalogue import Catalogue
from relax_core.runners.launch import Launch

pytestmark = pytest.mark.ray
CALL_S = 60.0
TWO = frozenset({"gpu:0", "gpu:1"})


def plan(**groups: tuple[int, frozenset[str]]) -> Plan:
    return Plan("", (), (), {name: WorkerGroup(name, size, devices=on) for name, (size, on) in groups.items()}, ())


OTHERS = frozenset({"gpu:2", "gpu:3"})
SHARED = plan(actor=(2, TWO), rollout=(2, TWO), reference=(1, frozenset({"gpu:0"})), judge=(1, OTHERS))


def specs(made: Plan, role: str) -> list[WorkerSpec]:
    group, env = made.groups[role], {"PYTHONPATH": os.getcwd()}
    device_sets = [group.process_devices(number) for number in range(group.size)]
    return [
        WorkerSpec(f"{role}-{number}", Chosen("role", role), env=env, devices=own, num_gpus=made.num_gpus(own),
                   target="tests.unit.runners.hosted:Hosted")
        for number, own in enumerate(device_sets)
    ]  # fmt: skip


async def test_processes_that_share_a_gpu_see_the_same_one_and_a_process_with_two_has_both(joined: None) -> None:
    from ray.util.placement_group import remove_placement_group

    from relax_core.runners.ray.workers import GpuPlacement, RayWorkers

    placement = GpuPlacement.request(SHARED)
    resolved = tuple(tuple(plugin) for plugin in Catalogue.load().resolved)
    launch = Launch(f"placement-{os.getpid()}", "", {}, SHARED, (), resolved)
    workers, started = RayWorkers(launch, "rollout", 1, placement), list[Any]()
    try:
        for role in SHARED.groups:
            started.extend(await workers.start(specs(SHARED, role), CALL_S))
        calls = (one.call("variable", "CUDA_VISIBLE_DEVICES", timeout_s=CALL_S) for one in started)
        seen = dict(zip([one.name for one in started], await asyncio.gather(*calls), strict=True))
        assert len({one.host for one in started}) == 1
        assert await started[0].free_port(started[0].host) > 0
    finally:
        for worker in started:
            await worker.kill()
        remove_placement_group(placement.group)
    judge = set(seen.pop("judge-0").split(","))
    assert len(judge) == 2
    assert seen["actor-0"] == seen["rollout-0"] == seen["reference-0"] != seen["actor-1"] == seen["rollout-1"]
    assert all(len(devices.split(",")) == 1 and devices for devices in seen.values())
    assert judge.isdisjoint(seen.values())


def test_placements_that_ray_cannot_share_are_refused_before_the_start() -> None:
    from relax_core.runners.ray.workers import gpu_sets, ray_share

    assert gpu_sets(SHARED) == (("gpu:0",), ("gpu:1",), ("gpu:2", "gpu:3"))
    assert 3 * ray_share(SHARED.num_gpus(("gpu:0",))) <= 1
    assert gpu_sets(plan(actor=(1, frozenset({"cpu:0"})))) == ()
    with pytest.raises(ConfigError, match="gpu:0, gpu:1 of one process, shared with more processes"):
        gpu_sets(plan(actor=(2, TWO), rollout=(1, TWO)))


async def test_an_elastic_engine_has_room_of_its_own_on_nodes_with_the_labels_until_it_leaves(joined: None) -> None:
    """The one node of the cluster has the label market=spot."""
    from ray.util import placement_group_table
    from ray.util.placement_group import remove_placement_group

    from relax_core.runners.ray.workers import GpuPlacement, RayWorkers, node_labels

    def groups() -> dict[str, Any]:
        return {name: one for name, one in placement_group_table().items() if one["state"] == "CREATED"}

    one = plan(rollout=(1, frozenset({"gpu:0"})))
    resolved = tuple(tuple(plugin) for plugin in Catalogue.load().resolved)

    def workers(market: str, gpus: GpuPlacement | None = None) -> RayWorkers:
        config = {"placement": {"elastic_labels": {"market": market}}}
        return RayWorkers(Launch(f"elastic-{os.getpid()}", "", config, one, (), resolved), "rollout", 1, gpus)

    first = specs(one, "rollout")[0]
    elastic = replace(first, name="rollout-1", devices=(), elastic=True)
    placement = GpuPlacement.request(one)
    assert placement is not None
    before, started = groups(), list[Any]()
    try:
        own = workers("spot", placement)
        started += await own.start([first], CALL_S)
        assert groups().keys() <= before.keys() | {placement.group.id.hex()}
        started += await own.start([elastic], CALL_S)
        (added,) = groups().keys() - before.keys() - {placement.group.id.hex()}
        assert groups()[added]["bundles"][0]["GPU"] == 1.0
        seen = [await one.call("variable", "CUDA_VISIBLE_DEVICES", timeout_s=CALL_S) for one in started]
        assert len(set(seen)) == 2
        await started.pop().kill()
        async with asyncio.timeout(CALL_S):
            while added in groups():
                await asyncio.sleep(0.05)
    finally:
        for worker in started:
            await worker.kill()
        remove_placement_group(placement.group)
    with pytest.raises(DeadlineExceeded, match="room for rollout-1"):
        await workers("reserved").start([elastic], 0.5)
    with pytest.raises(DeadlineExceeded, match="room for rollout-0"):
        await workers("spot").start([first], 0.5)
    assert node_labels({}, elastic=True) == node_labels({}, elastic=False) == {}


def test_the_nodes_that_ray_drains_are_known_by_their_addresses(joined: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real call answers for a healthy cluster; a scripted answer names its node."""
    import ray
    from ray._private.worker import global_worker

    from relax_core.runners.ray.cluster import draining_hosts

    class Notices:
        def get_draining_nodes(self, timeout: float) -> dict[str, int]:
            return {node["NodeID"]: 0 for node in ray.nodes()} | {"a node that has ended": 0}

    assert draining_hosts() == frozenset()
    monkeypatch.setattr(global_worker, "gcs_client", Notices())
    assert draining_hosts() == {str(node["NodeManagerAddress"]) for node in ray.nodes()}
