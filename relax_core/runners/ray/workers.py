# SPDX-License-Identifier: Apache-2.0
"""Workers on Ray: named actors in a placement group, each hosting one component.

The shell of a role starts the role's workers. Ray ends an actor with the actor that created it, so workers end with
their shell. A worker that needs another interpreter is a child process of its actor.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from types import MappingProxyType
from typing import Any, Self

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from relax_core.api.errors import ConfigError, DeadlineExceeded, WorkerDied
from relax_core.api.plan import Plan
from relax_core.api.role import SystemClock, Worker, WorkerSpec
from relax_core.observe.process_log import record_process
from relax_core.registry.catalogue import Catalogue
from relax_core.rpc.host import Failure, Host, describe, free_port, raised
from relax_core.rpc.waiting import start_all
from relax_core.runners.launch import Launch
from relax_core.runners.local.workers import LocalWorkers
from relax_core.runners.ray.connection import NAMESPACE, RpcActor, RpcClient, answered, asked, well_formed

BUNDLE_CPUS = 0.001
"""CPU share of a bundle. Ray requires a resource in each bundle; the operating system shares the cores."""
NO_LABELS: Mapping[str, str] = MappingProxyType({})
PARTS = 10_000
"""Ray counts resources in steps of 1 / PARTS."""


@dataclass(frozen=True, slots=True)
class GpuPlacement:
    """The GPUs of a run: one placement group with a bundle for each set of GPUs that a process uses.

    If the plan puts several processes on one GPU, each is placed in this GPU's bundle with a fraction of the GPU. The
    hub requests the placement group, which ends with the hub.
    """

    group: PlacementGroup
    bundles: tuple[tuple[str, ...], ...]
    """The devices of each bundle of the group."""

    @classmethod
    def request(cls, plan: Plan, labels: Mapping[str, str] = NO_LABELS) -> Self | None:
        """Request all GPUs of the run at once, on nodes that `labels` selects; return None if the plan has no GPUs."""
        sets = gpu_sets(plan)
        if not sets:
            return None
        bundles = [{"GPU": float(len(own)), "CPU": BUNDLE_CPUS * plan.device_sets[own]} for own in sets]
        return cls(_group(bundles, [labels] * len(bundles)), sets)


def gpu_sets(plan: Plan) -> tuple[tuple[str, ...], ...]:
    """List the sets of GPUs that a process uses, in order of GPU numbers.

    Raises ConfigError if a process with several GPUs would share any of these.
    """
    found = [own for own in plan.device_sets if any(name.startswith("gpu:") for name in own)]
    for own in (ordered := sorted(found, key=lambda own: [int(name.removeprefix("gpu:")) for name in own])):
        if len(own) > 1 and plan.num_gpus(own) < len(own):
            fix = "Ray shares a GPU only among processes with a single GPU: give them separate devices, or one GPU each"
            raise ConfigError("placement", f"{', '.join(own)} of one process, shared with more processes", fix)
    return tuple(ordered)


def node_labels(config: Mapping[str, Any], elastic: bool) -> dict[str, str]:
    """Return Ray's selector of the nodes for elastic engines, or for everything else, from a run's configuration."""
    labels: Mapping[str, str] = config.get("placement", {}).get("elastic_labels", {})
    return {name: value if elastic else f"!{value}" for name, value in labels.items()}


def _group(bundles: Sequence[dict[str, float]], labels: Sequence[Mapping[str, str]]) -> PlacementGroup:
    """Request a placement group; each bundle goes to a node that its labels select."""
    selectors = [dict(own) for own in labels] if any(labels) else None
    return placement_group(list(bundles), strategy="PACK", bundle_label_selector=selectors)


def ray_share(num_gpus: float) -> float:
    """Round a number of GPUs down to Ray's resolution, so that the shares of one GPU never add up to more than 1."""
    return math.floor(num_gpus * PARTS) / PARTS


CONCURRENCY = 64
PORT_S = 30.0


@ray.remote(max_restarts=0)
class WorkerActor(RpcActor):
    """An actor that hosts one component in its process."""

    async def open(self, *args: Any) -> Any:
        """Start to host a component: `_open`, whose error is returned as a `Failure`."""
        return await answered(self._open(*args))

    async def _open(self, spec: WorkerSpec, launch: Launch, role: str, run_env: Mapping[str, str]) -> int:
        self._child: Worker | None = None
        os.environ.update(run_env)  # not in Ray's runtime environment, which is logged
        log = launch.process_log(spec.name, role)
        if spec.python:
            # Without devices in its specification, the child inherits the visible devices of this actor.
            workers = LocalWorkers(launch.plugin_files, launch.resolved, run_env=run_env)
            if log is not None:
                workers = LocalWorkers.of_run(launch, SystemClock(), role)
            (self._child,) = await workers.start([replace(spec, devices=())])
            await self._server.open()
            return self._child.pid
        record_process(log)
        catalogue = await asyncio.to_thread(Catalogue.load, launch.plugin_files)
        catalogue.verify(launch.resolved)
        self._host = await asyncio.to_thread(Host.make, spec.component, spec.target, catalogue)
        await self._server.open()
        return os.getpid()

    async def host(self) -> str:
        """Return the address of this node."""
        return str(ray.util.get_node_ip_address())

    async def free_port(self, address: str) -> int:
        """Return a free port of this node."""
        return free_port(address)

    async def _serve(self, method: str, args: Sequence[Any]) -> Any:
        arguments, timeout_s = args
        if self._child is not None:
            return await self._child.call(method, *arguments, timeout_s=timeout_s)
        return await self._host.call(method, arguments)

    async def stream(self, method: str, args: tuple[Any, ...], timeout_s: float) -> AsyncIterator[Any]:
        try:
            child = self._child
            items = child.stream(method, *args, timeout_s=timeout_s) if child else self._host.stream(method, args)
            async for item in items:
                yield item
        except Exception as error:
            yield describe(error)


class RayWorker:
    """A handle on one worker actor: `api.role.Worker`."""

    def __init__(self, name: str, actor: Any, pid: int, host: str, group: PlacementGroup | None) -> None:
        """`group`: placement group to remove with the actor; None if it belongs to the run."""
        self.name, self.pid, self.host, self.alive = name, pid, host, True
        self._actor, self._group = actor, group
        self._client = RpcClient(actor, name)

    async def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        return await self._client.call(method, (args, timeout_s), timeout_s)

    async def free_port(self, address: str) -> int:
        port: int = await asked(self._actor.free_port.remote(address), self.name, "free_port", PORT_S, int)
        return port

    async def stream(self, method: str, *args: Any, timeout_s: float) -> AsyncIterator[Any]:
        items = self._actor.stream.options(num_returns="streaming").remote(method, args, timeout_s)
        while True:
            try:
                async with asyncio.timeout(timeout_s):
                    item = well_formed(await (await items.__anext__()), Any, method)
            except StopAsyncIteration:
                return
            except TimeoutError:
                raise DeadlineExceeded(self.name, f"the next item of {method}", timeout_s) from None
            except (RayError, ConnectionError) as error:
                reason = str(error).strip().partition("\n")[0]
                raise WorkerDied(f"{self.name} (pid {self.pid}) died during {method}: {reason}") from error
            if isinstance(item, Failure):
                raise raised(item, self.name)
            yield item

    async def stop(self, timeout_s: float = 5.0) -> None:
        await self.kill()

    async def kill(self) -> None:
        self.alive = False
        await self._client.close()
        ray.kill(self._actor)
        if self._group is not None:
            with contextlib.suppress(RayError):
                remove_placement_group(self._group)


class RayWorkers:
    """The worker actors of one role: `api.role.Workers`. Actors end with the process that starts them."""

    def __init__(self, launch: Launch, role: str, registration: int, gpus: GpuPlacement | None = None) -> None:
        """`gpus`: the GPUs of the run; an elastic engine has GPUs of its own instead."""
        self._launch, self._gpus, self._role, self._run_env = launch, gpus, role, launch.run_env
        self._prefix = f"relax-{launch.run_id}-{role}-{registration}"
        self._numbers = count(1)
        self._started: list[RayWorker] = []

    async def start(self, specs: Sequence[WorkerSpec], timeout_s: float = 120.0) -> tuple[Worker, ...]:
        planned = self._gpus is not None and all(spec.num_gpus and not spec.elastic for spec in specs)
        gpus = self._gpus if planned else None
        labels = [node_labels(self._launch.config, spec.elastic) for spec in specs]
        bundles = [
            {"CPU": BUNDLE_CPUS, **({"GPU": ray_share(spec.num_gpus)} if spec.num_gpus else {})} for spec in specs
        ]
        group = gpus.group if gpus else _group(bundles, labels)
        own = None if gpus else group
        actors: list[Any] = []
        try:
            await asked(group.ready(), "ray", f"room for {', '.join(spec.name for spec in specs)}", timeout_s)
            for number, spec in enumerate(specs):
                actors.append(self._actor(spec, group, gpus.bundles.index(spec.devices) if gpus else number))
            opening = [self._open(actor, spec, own, timeout_s) for actor, spec in zip(actors, specs, strict=True)]
            started = await start_all(*opening)
        except BaseException:  # release the actors' resources on the cluster
            for actor in actors:
                ray.kill(actor)
            if own is not None:
                remove_placement_group(own)
            raise
        self._started = [*(worker for worker in self._started if worker.alive), *started]
        return tuple(started)

    async def close(self) -> None:
        await asyncio.gather(*(worker.kill() for worker in self._started))
        self._started = []

    async def _open(self, actor: Any, spec: WorkerSpec, own: PlacementGroup | None, timeout_s: float) -> RayWorker:
        launch = self._launch
        opening = actor.open.remote(spec, launch, self._role, self._run_env)
        pid: int = await asked(opening, spec.name, "start", timeout_s, int)
        host: str = await asked(actor.host.remote(), spec.name, "host", timeout_s, str)
        return RayWorker(spec.name, actor, pid, host, own)

    def _actor(self, spec: WorkerSpec, group: PlacementGroup, bundle: int) -> Any:
        return WorkerActor.options(  # type: ignore[attr-defined]
            name=f"{self._prefix}-{spec.name}-{next(self._numbers)}",
            namespace=NAMESPACE,
            num_cpus=0,
            max_concurrency=CONCURRENCY,
            num_gpus=ray_share(spec.num_gpus),
            runtime_env={"env_vars": dict(spec.env)} if spec.env else None,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle),
        ).remote()
