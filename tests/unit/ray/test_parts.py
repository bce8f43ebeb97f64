# SPDX-License-Identifier: Apache-2.0
"""The parts of the Ray runner that need no cluster: replicas, heartbeat, answers, calls by name, the environment."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from typing import Any

import pytest
from ray.exceptions import RaySystemError

from relax_core.api.errors import (
    ConfigError,
    DeadlineExceeded,
    InfrastructureError,
    PluginError,
    StaleFence,
    WorkerDied,
)
from relax_core.api.role import RunStatus
from relax_core.rpc.host import Failure
from relax_core.runners.ray.connection import RpcClient, answered, asked
from relax_core.runners.ray.environment import settle
from relax_core.runners.ray.shell import LIMIT_S, LoopHeartbeat, RoleShell
from tests.clocks import HandClock

# -- heartbeat ------------------------------------------------------------------------------------------------------------


def test_a_blocked_event_loop_is_reported_until_it_runs_again() -> None:
    clock = HandClock(0.0)
    heartbeat = LoopHeartbeat("rollout", clock)
    clock.at = LIMIT_S
    heartbeat.check()
    clock.at = LIMIT_S + 1
    with pytest.raises(InfrastructureError, match="role rollout: its event loop has been blocked for 61 s"):
        heartbeat.check()
    heartbeat.beat()
    heartbeat.check()


# -- joining --------------------------------------------------------------------------------------------------------------


class UnjoinableHub:
    """A living hub that answers `join` with an error."""

    def __init__(self, answer: Any) -> None:
        self.join = self.end_role = self
        self._answer, self.told = answer, list[Any]()

    async def remote(self, role: str, *args: Any) -> Any:
        if len(args) == 1:  # end_role
            self.told.append((role, *args))
            return None
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (Failure("InfrastructureError", "disk full"), Failure("InfrastructureError", "disk full")),
        (
            RaySystemError("no object store"),
            Failure("WorkerDied", "hub died during join: System error: no object store"),
        ),
        (None, None),
    ],
)
async def test_a_role_that_cannot_join_ends_with_the_reason(answer: Any, told: Failure | None) -> None:
    shell, hub = object.__new__(RoleShell), UnjoinableHub(answer)
    shell._role, shell._replica, shell._loop = "rollout", None, None
    await shell._join_and_run(hub)
    ((role, failure),) = hub.told
    assert role == "rollout" and (failure and (failure.type, failure.message)) == (told and (told.type, told.message))


# -- answers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("a.b", 3, "give 4"),
        StaleFence("lease 3"),
        ValueError("no"),
        DeadlineExceeded("a", "b", 2.0, "raise c"),
    ],
)
async def test_an_error_comes_back_as_its_own_type(error: Exception) -> None:
    async def fail() -> None:
        raise error

    answer = await answered(fail())
    assert isinstance(answer, Failure)
    with pytest.raises(type(error)) as seen:
        await asked(_value(answer), "hub", "call", 1.0)
    assert str(seen.value) == str(error)


async def test_an_error_of_a_plugin_keeps_its_frames() -> None:
    async def fail() -> None:
        raise LookupError("author's mistake")

    with pytest.raises(PluginError, match="engine-0: LookupError: author's mistake") as seen:
        await asked(_value(await answered(fail())), "engine-0", "call", 1.0)
    assert "test_parts.py" in seen.value.frames


async def test_no_answer_is_a_deadline_and_a_dead_actor_a_death() -> None:
    import ray

    with pytest.raises(DeadlineExceeded, match="hub waited"):
        await asked(asyncio.Event().wait(), "hub", "call", 0.01)

    async def die() -> None:
        raise ray.exceptions.RayActorError

    with pytest.raises(WorkerDied, match="hub died during call"):
        await asked(die(), "hub", "call", 1.0)


async def test_a_client_calls_its_service_by_name() -> None:
    calls: list[Any] = []
    client = RpcClient(None, "hub")

    async def call(method: str, args: Any) -> Any:
        calls.append((method, args))
        return ("command",)

    client.call = call  # type: ignore[assignment,method-assign]
    assert await client.service(RunStatus, "run_status").commands("actor", 3, 1.0) == ("command",)  # type: ignore[type-abstract]
    assert calls == [("run_status.commands", ("actor", 3, 1.0))]


async def _value(value: Any) -> Any:
    return value


# -- environment ------------------------------------------------------------------------------------------------------


def test_a_cluster_started_by_relax_listens_on_loopback_requires_a_token_and_sends_no_usage_reports() -> None:
    code = (
        "import os, sys; from relax_core.control.prepare import plan_run;"
        "plan_run(['quickstart'], ['run.runner=ray']);"  # whatever imports ray first, it finds its settings
        "assert 'ray' in sys.modules;"
        "print(*map(os.environ.get, ('RAY_USAGE_STATS_ENABLED', 'RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER', 'RAY_AUTH_MODE')),"
        "len(os.environ.get('RAY_AUTH_TOKEN', '')))"
    )
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "0", "token", "64"]


def test_a_cluster_that_is_joined_has_its_own_addresses_and_token(monkeypatch: pytest.MonkeyPatch) -> None:
    environ = {"RAY_ADDRESS": "10.0.0.1:6379"}
    monkeypatch.setattr(os, "environ", environ)
    monkeypatch.delitem(sys.modules, "ray")
    settle()
    assert environ["RAY_USAGE_STATS_ENABLED"] == "0"
    assert not {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"} & environ.keys()
