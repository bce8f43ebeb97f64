# SPDX-License-Identifier: Apache-2.0
"""A role's life: restarted where that helps, ended with its reason where not, and never deaf to its own end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from relax_core.api.errors import ConfigError, DiskFull, InfrastructureError, PluginError, RelaxError, WorkerDied
from relax_core.api.events import RoleFailed, RoleRecovered, TimeSpent
from relax_core.api.role import Context, Role
from relax_core.api.run_commands import Continue, Pause, Stop
from relax_core.runners.context import HEARTBEAT_S, MAX_RESTARTS, run_role
from tests.unit.roles.virtual_time import run_virtual
from tests.unit.runners.conftest import Backstage


class Scripted(Role):
    """Does what its script says, one line a life."""

    name = "advantages"

    def __init__(self, *lines: Exception | Callable[[Context], Any], stateless: bool = True) -> None:
        super().__init__()
        self._lines, self.stateless, self.lives = list(lines), stateless, []

    async def run(self, context: Context) -> None:
        self.lives.append(context.registration)
        line = self._lines.pop(0) if self._lines else None
        if isinstance(line, Exception):
            raise line
        if line is not None:
            await line(context)


def run(backstage: Backstage, role: Scripted) -> tuple[list[Any], list[Any], Exception | None]:
    """Events, last beat and the error of a role's whole life."""

    async def scene() -> tuple[list[Any], list[Any], Exception | None]:
        run_status, make = await backstage("advantages")
        error = None
        try:
            await run_role(role, make)
        except Exception as raised:
            error = raised
        told = [event for _, event in await run_status.events(0, 0.0) if not isinstance(event, TimeSpent)]
        return told, list(await run_status.heartbeats()), error

    return run_virtual(scene(), 1e4)


async def works_on(context: Context) -> None:
    await asyncio.sleep(3.0)
    context.doing("crediting")
    await asyncio.sleep(1.0)


def test_a_stateless_role_is_restarted_after_the_machine_failed_it(backstage: Backstage) -> None:
    role = Scripted(WorkerDied("rank 0 ended"), works_on)
    events, (beat,), error = run(backstage, role)
    assert error is None and role.lives == [1, 2]
    failed, recovered = events
    assert (failed.role, failed.error, failed.exit_code, failed.fatal) == ("advantages", "rank 0 ended", 4, False)
    assert isinstance(recovered, RoleRecovered) and recovered.seconds >= 3.0
    assert (beat.state, beat.registration) == ("stopped", 2)


def test_a_role_that_ends_before_its_next_heartbeat_is_reported_as_recovered(backstage: Backstage) -> None:
    async def starts_and_ends_soon(context: Context) -> None:
        await asyncio.sleep(HEARTBEAT_S / 4)
        context.doing("crediting")
        await asyncio.sleep(HEARTBEAT_S / 2)

    events, _, error = run(backstage, Scripted(WorkerDied("rank 0 ended"), starts_and_ends_soon))
    assert error is None and [type(event) for event in events] == [RoleFailed, RoleRecovered]
    assert events[1].detail == "restarted" and events[1].seconds == pytest.approx(HEARTBEAT_S * 3 / 4)


def test_the_restart_budget_of_a_role_is_finite(backstage: Backstage) -> None:
    role = Scripted(*(InfrastructureError(f"disk {n}") for n in range(10)))
    events, (beat,), error = run(backstage, role)
    assert str(error) == f"disk {MAX_RESTARTS}" and len(role.lives) == MAX_RESTARTS + 1
    failures = [event for event in events if isinstance(event, RoleFailed)]
    assert [failure.fatal for failure in failures] == [False] * MAX_RESTARTS + [True]
    assert (beat.state, beat.doing) == ("failed", f"disk {MAX_RESTARTS}")


def test_restarts_long_ago_are_forgiven(backstage: Backstage, monkeypatch: pytest.MonkeyPatch) -> None:
    """A month of work may see more failures than a bad hour."""
    monkeypatch.setattr("relax_core.runners.context.REFILL_S", 20.0)

    async def dies_after_half_of_it(context: Context) -> None:
        await asyncio.sleep(10.0)
        raise InfrastructureError("disk")

    role = Scripted(*[dies_after_half_of_it] * (MAX_RESTARTS + 2), works_on)
    _, _, error = run(backstage, role)
    assert error is None and len(role.lives) == MAX_RESTARTS + 3


@pytest.mark.parametrize("without_s", [None, 0.0])
def test_a_role_learns_that_its_last_process_in_this_start_of_the_run_died(
    backstage: Backstage, without_s: float | None
) -> None:
    async def scene() -> list[tuple[int, bool]]:
        _, make = await backstage("advantages")
        await make(0).bus.register("advantages")  # registrations are counted over all starts
        seen: list[tuple[int, bool]] = []

        async def looks(context: Any) -> None:
            seen.append((context.registration, context.restarted))

        await run_role(Scripted(looks), make, without_s)
        return seen

    assert run_virtual(scene(), 1e4) == [(2, without_s is not None)]


def test_a_failure_of_the_restart_itself_counts_as_one(backstage: Backstage) -> None:
    async def scene() -> tuple[list[bool], list[int]]:
        run_status, make = await backstage("advantages")
        bus, tries = make(0).bus, 0
        register = bus.register

        async def refused(role: str) -> Any:
            nonlocal tries
            tries += 1
            if tries in (1, 3):
                raise InfrastructureError("bus: no answer")
            return await register(role)

        bus.register = refused
        role = Scripted(WorkerDied("rank 0 ended"), works_on)
        await run_role(role, make)
        events = [event for _, event in await run_status.events(0, 0.0)]
        return [event.fatal for event in events if isinstance(event, RoleFailed)], role.lives

    assert run_virtual(scene(), 1e4) == ([False] * 3, [1, 2])


@pytest.mark.parametrize(
    ("error", "stateless", "code", "frames"),
    [
        (WorkerDied("rank 0 ended"), False, 4, ""), (DiskFull("no space left to write"), True, 4, ""),
        (ConfigError("a.b", 1, "write 2"), True, 2, ""), (RelaxError("no"), True, 1, ""),
        (PluginError("reward x", "it raised", "author.py:3"), True, 3, "author.py:3"),
        (ZeroDivisionError("x / 0"), True, 1, "test_role_runner.py"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)  # fmt: skip
def test_an_error_that_a_restart_does_not_mend_ends_the_role_with_its_code_and_frames(
    backstage: Backstage, error: Exception, stateless: bool, code: int, frames: str
) -> None:
    role = Scripted(error, stateless=stateless)
    (failed,), (beat,), raised = run(backstage, role)
    assert raised is error and role.lives == [1]
    assert (failed.exit_code, failed.fatal, beat.state) == (code, True, "failed")
    assert frames in failed.frames


def test_a_role_sends_heartbeats_and_receives_commands_while_it_works(backstage: Backstage) -> None:
    async def scene() -> list[tuple[str, str]]:
        run_status, make = await backstage("advantages")

        async def until_stopped(context: Context) -> None:
            context.doing("counting")
            while not context.stopping:
                await asyncio.sleep(0.1)

        going = asyncio.create_task(run_role(Scripted(until_stopped), make))
        seen = []
        for command in (Pause(), Continue(), Stop()):
            await asyncio.sleep(HEARTBEAT_S * 2)
            seen += [(beat.state, beat.doing) for beat in await run_status.heartbeats()]
            await run_status.command("advantages", command)
        await going
        return [*seen, *((beat.state, beat.doing) for beat in await run_status.heartbeats())]

    working = ("busy", "counting")  # also after the pause: this role has no pause point
    assert run_virtual(scene(), 60.0) == [working, working, working, ("stopped", "")]


@pytest.mark.parametrize("loop", ["heartbeat", "commands"])
@pytest.mark.parametrize("stateless", [False, True])
def test_an_error_of_its_heartbeats_or_its_commands_ends_a_role_at_once(
    backstage: Backstage, monkeypatch: pytest.MonkeyPatch, loop: str, stateless: bool
) -> None:
    async def scene() -> tuple[float, list[Any], Exception | None, list[int]]:
        run_status, make = await backstage("advantages")
        real, cut_at = getattr(run_status, loop), 5.0

        async def cut(*args: Any) -> Any:
            if cut_at <= asyncio.get_running_loop().time() < cut_at + 1.0:
                raise WorkerDied("hub died during heartbeat")
            return await real(*args)

        monkeypatch.setattr(run_status, loop, cut)
        cancelled = []

        async def works_long(context: Context) -> None:
            try:
                await asyncio.sleep(100.0)
            except asyncio.CancelledError:
                cancelled.append(asyncio.get_running_loop().time())
                await asyncio.sleep(2.0)  # it stops its workers
                raise

        role, error = Scripted(works_long, works_on, stateless=stateless), None
        try:
            await run_role(role, make)
        except Exception as raised:
            error = raised
        told = [event for _, event in await run_status.events(0, 0.0) if isinstance(event, RoleFailed)]
        return cancelled[0], told, error, role.lives

    cancelled_at, (failed,), error, lives = run_virtual(scene(), 1e3)
    assert 5.0 <= cancelled_at <= 11.0, "a poll for commands lasts five seconds"
    assert (failed.error, failed.fatal) == ("hub died during heartbeat", not stateless)
    assert (error is None, lives) == ((True, [1, 2]) if stateless else (False, [1]))
    assert error is None or (isinstance(error, WorkerDied) and error.args == ("hub died during heartbeat",))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(after_s=st.floats(0.0, 3.0), turns=st.integers(0, 20))
def test_a_role_cancelled_at_any_moment_ends(backstage: Backstage, after_s: float, turns: int) -> None:
    """While it registers, works, reports a failure or starts anew."""

    async def scene() -> None:
        _, make = await backstage("advantages")

        async def work(context: Context) -> None:
            with context.waiting("nothing", "nobody", 1.0):
                await context.bus.admit("advantages", await context.bus.version(), 0, 0.7)
            raise WorkerDied("gone")

        going = asyncio.create_task(run_role(Scripted(work, work, work), make))
        await asyncio.sleep(after_s)
        for _ in range(turns):
            await asyncio.sleep(0)
        going.cancel()
        await asyncio.wait({going}, timeout=30.0)
        assert going.done()

    run_virtual(scene(), 100.0)
