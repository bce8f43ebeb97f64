# SPDX-License-Identifier: Apache-2.0
"""One controller commands a run's hub at a time; a successor takes over in time, or the run ends by itself."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given, strategies as st

from relax_core.api.errors import InfrastructureError, StaleFence, WorkerDied
from relax_core.api.plan import Plan
from relax_core.runners.launch import Launch

LENGTH_S = 10.0
WAIT_S = 60.0


@given(st.lists(st.tuples(st.floats(0, 8), st.sampled_from(["renew", "take over", "look"]), st.integers(1, 4))))
def test_only_the_newest_term_renews_and_an_expired_lease_is_nobodys(moves: list[tuple[float, str, int]]) -> None:
    from relax_core.runners.ray.controller_lease import ControllerLease

    lease, now, term, heard, expired = ControllerLease(LENGTH_S, 0.0), 0.0, 1, 0.0, False
    for passed, move, holder in moves:
        now += passed
        if move == "renew" and holder == term:
            lease.renew(holder, now)
            heard = now
        elif move == "renew":
            with pytest.raises(StaleFence, match=f"term {term}.*had term {holder}"):
                lease.renew(holder, now)
        elif move == "look" or now - heard >= LENGTH_S or expired:
            expired |= now - heard >= LENGTH_S
            assert lease.expired(now) == expired
            if expired:
                with pytest.raises(InfrastructureError, match="it is ending"):
                    lease.take_over(now)
        else:
            term, heard = term + 1, now
            assert lease.take_over(now) == term
        assert lease.term == term


def _hub(run: Path, lease_s: float, name: str) -> Any:
    from relax_core.runners.ray.hub import Hub, hub_options

    return Hub.options(**hub_options(name, supervised=True)).remote(lease_s)  # type: ignore[attr-defined]


def _workers(lease_s: float, name: str) -> Any:
    from relax_core.runners.ray.worker_owner import OwnedWorkers, WorkerOwner, owner_name, owner_options

    owner = WorkerOwner.options(**owner_options(name, supervised=True)).remote(lease_s)  # type: ignore[attr-defined]
    return OwnedWorkers(owner, owner_name(name))


@pytest.mark.ray
@pytest.mark.faults
async def test_a_controller_that_was_replaced_commands_nothing_any_more(joined: None, tmp_path: Path) -> None:
    from relax_core.api.role import RunStatus
    from relax_core.registry.catalogue import Catalogue
    from relax_core.runners.ray.connection import RpcClient, asked
    from relax_core.runners.ray.runner import RayRunner

    name = f"replaced-{os.getpid()}"
    hub = _hub(tmp_path, 600.0, name)
    (tmp_path / "mark").touch()
    with pytest.raises(InfrastructureError, match="the run had not been opened"):
        RayRunner(Catalogue.load(), supervised=True).take_over(name)
    config = {"bus": {"name": "ray"}, "rollout": {"prompts_per_step": 1, "late": "wait", "spare_groups": 0}, "steps": 2}
    launch = Launch(name, str(tmp_path), config, Plan("hybrid", (), (), {}, ()))
    store = await asked(hub.open.remote(launch, "mark", _workers(600.0, name), {}), "hub", "open", WAIT_S)
    client = RpcClient(hub, "hub")
    await client.service(RunStatus, "run_status@1").command("actor", "checkpoint")

    successor = RayRunner(Catalogue.load(), supervised=True)
    assert successor.take_over(name).run_dir == str(tmp_path)
    with pytest.raises(StaleFence, match=r"\(term 2\); this one had term 1"):
        await client.service(RunStatus, "run_status@1").command("actor", "stop")
    for refused in (hub.renew.remote(1), hub.ends.remote(0, 1), hub.close.remote(1)):
        with pytest.raises(StaleFence):
            await asked(refused, "hub", "obey", WAIT_S)
    commands = await client.service(RunStatus, "run_status").commands("actor", 0, 0.0)
    assert [command.name for command in commands] == ["checkpoint"], "roles reach it as before"
    await asked(hub.renew.remote(2), "hub", "renew", WAIT_S)
    await successor.start(launch)
    await successor.run_status.command("actor", "stop")
    await client.close()
    await store.let_go()
    await successor.close()
    with pytest.raises(InfrastructureError, match="no hub of"):
        RayRunner(Catalogue.load(), supervised=True).take_over(name)


@pytest.mark.ray
@pytest.mark.faults
async def test_a_hub_whose_controller_has_no_successor_ends_with_what_it_started(joined: None, tmp_path: Path) -> None:
    from relax_core.bus.ledger_file import FILE
    from relax_core.runners.ray.connection import asked

    name = f"left-{os.getpid()}"
    hub = _hub(tmp_path, 5.0, name)
    (tmp_path / "mark").touch()
    config = {"bus": {"name": "ray"}, "rollout": {"prompts_per_step": 1, "late": "wait", "spare_groups": 0}, "steps": 2}
    workers = _workers(5.0, name)
    dying = asyncio.create_task(workers.died())
    launch = Launch(name, str(tmp_path), config, Plan("hybrid", (), (), {}, ()))
    await workers.open(launch)
    opening = hub.open.remote(launch, "mark", workers, {})
    store = await asked(opening, "hub", "open", WAIT_S)
    folder = store._folders[0]
    pid = await asked(hub.__ray_call__.remote(lambda _: os.getpid()), "hub", "pid", WAIT_S)
    for alive in (hub.alive, workers.owner.lives):
        with pytest.raises(WorkerDied):
            while True:
                await asked(alive.remote(), "actor", "its end", WAIT_S)
    with pytest.raises(WorkerDied, match="worker owner died"):
        await dying
    psutil.wait_procs([psutil.Process(pid)] if psutil.pid_exists(pid) else [], WAIT_S)
    assert (tmp_path / FILE).exists() and not folder.here
    unopened = _hub(tmp_path, 0.1, f"{name}-unopened")
    with pytest.raises(WorkerDied):
        while True:
            await asked(unopened.alive.remote(), "hub", "its end", WAIT_S)


@pytest.mark.ray
@pytest.mark.faults
async def test_a_start_of_a_run_ends_what_lives_of_earlier_ones_and_of_no_other_run(
    joined: None, tmp_path: Path
) -> None:
    import ray

    from relax_core.observe.epoch import RunEpoch
    from relax_core.runners.ray.connection import asked
    from relax_core.runners.ray.runner import end_former_starts

    run = f"again-{os.getpid()}"
    former, present, other = (_hub(tmp_path, 600.0, name) for name in (f"{run}-1", f"{run}-3", f"{run}-x-1"))
    idle, kept = (_workers(600.0, name) for name in (f"{run}-1", f"{run}-2"))
    for alive in (former.alive, present.alive, other.alive, idle.owner.lives, kept.owner.lives):
        await asked(alive.remote(), "actor", "start", WAIT_S)
    launch = Launch(f"{run}-3", "", {}, Plan("hybrid", (), (), {}, ()), epoch=RunEpoch("", 3))
    end_former_starts(launch, kept)
    for alive in (former.alive, idle.owner.lives):
        with pytest.raises(WorkerDied):
            while True:
                await asked(alive.remote(), "actor", "its end", WAIT_S)
    for alive in (present.alive, other.alive, kept.owner.lives):
        await asked(alive.remote(), "actor", "live on", WAIT_S)
    for actor in (present, other, kept.owner):
        ray.kill(actor)


@pytest.mark.ray
@pytest.mark.faults
async def test_shells_hear_of_the_next_start_of_a_run_and_one_application_runs_a_role(
    joined: None, tmp_path: Path
) -> None:
    import ray

    from relax_core.runners.ray.connection import asked

    name = f"next-{os.getpid()}"
    workers, hub = _workers(600.0, name), _hub(tmp_path, 600.0, name)

    async def heard(after: str, wait_s: float = WAIT_S) -> str:
        return str(await asked(workers.owner.start_after.remote(after, wait_s), "worker owner", "start_after", WAIT_S))

    first = asyncio.create_task(heard(""))
    assert await heard("", 0.1) == "", "no start has been opened"
    config = {"bus": {"name": "ray"}, "rollout": {"prompts_per_step": 1, "late": "wait", "spare_groups": 0}, "steps": 2}
    launch = Launch(f"{name}-1", str(tmp_path), config, Plan("hybrid", (), ("rollout", "actor"), {}, ()))
    await workers.open(launch)
    assert await first == await heard("") == f"{name}-1"
    second = asyncio.create_task(heard(f"{name}-1"))
    assert await heard(f"{name}-1", 0.1) == ""
    assert await workers.close(keep=True)
    await workers.open(replace(launch, run_id=f"{name}-2"))
    assert await second == f"{name}-2"

    (tmp_path / "mark").touch()
    kept = {"rollout": "old-rollout", "actor": "old-actor"}
    await asked(hub.open.remote(launch, "mark", workers, kept), "hub", "open", WAIT_S)

    async def joins(role: str, app: str) -> bool:
        return await asked(hub.join.remote(role, hub, 1, app), "hub", "join", WAIT_S) is not None

    assert await joins("rollout", "old-rollout")
    own = {"rollout": "new-rollout", "actor": "new-actor"}
    assert await asked(hub.replace_missing.remote(own), "hub", "replace", WAIT_S) == ("actor",)
    assert not await joins("actor", "old-actor") and not await joins("rollout", "new-rollout")
    assert await joins("actor", "new-actor") and await joins("rollout", "old-rollout")
    for actor in (hub, workers.owner):
        ray.kill(actor)
