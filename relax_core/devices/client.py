# SPDX-License-Identifier: Apache-2.0
"""A role's client of the device service: device leases (`api.role.DeviceLeases`), and offloading on command.

Devices that the plan gives to one role alone are leased at once, without a call. For shared devices, a task polls the
service from the first use on. The task receives answers about leases, and commands to offload and load members.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from typing import Any

from relax_core.api.errors import DeadlineExceeded, InfrastructureError, RelaxError
from relax_core.api.plan import OffloadPart
from relax_core.api.role import DeviceLease, Offloadable, Phase
from relax_core.devices.scheduler import DeviceCommand, DeviceRequest, DeviceService, role_of

DEVICE_LEASE_WAIT_S = 3600.0
"""Longest wait for a device lease: as long as the longest call of a trainer, in which its holder may be."""
POLL_S = 10.0
GRACE_S = 30.0
"""Seconds beyond a lease's deadline until a service that has neither granted nor refused the lease counts as lost."""
SCHEDULER = "device scheduler"
"""Value of `Wait.blocked_by` while a role waits for a lease that no lease or member blocks."""

Holders = Mapping[str, Sequence[OffloadPart]]
Waiting = Callable[[str, str, float], AbstractContextManager[Any]]


class NullDeviceLease:
    """A lease on devices that one role uses alone: all members stay loaded, and `wanted` never returns."""

    freed_bytes = 0

    async def change_phase(self, phase: Phase, holders: Holders, deadline_s: float) -> None:
        return

    async def wanted(self) -> None:
        await asyncio.Event().wait()


class HeldDeviceLease:
    """A lease on shared devices.

    Invariants: `answer` is pending exactly while the scheduler prepares the lease; an error of the client ends the
    lease for good.
    """

    def __init__(self, client: DeviceLeaseClient, request: DeviceRequest) -> None:
        self._client, self._request = client, request
        self._ready = True
        """True if the scheduler granted the current request; False while a phase change is pending or if it failed."""
        self.freed_bytes = 0
        self.answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._wanted: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def change_phase(self, phase: Phase, holders: Holders, deadline_s: float) -> None:
        """Change to a phase with new holders; return at once if the lease has this phase and these holders already."""
        old, parts = self._request, _plain(holders)
        if self._ready and (phase, parts) == (old.phase, old.holders):
            return
        self._ready, self.answer = False, asyncio.get_running_loop().create_future()
        self._request = DeviceRequest(old.id, old.owner, frozenset(), phase, parts, deadline_s)
        await self._client.change_phase(self, self._request)
        self._ready = True

    async def wanted(self) -> None:
        """Wait until another role needs the devices; raise an error if the scheduler, and so the lease, is lost."""
        await asyncio.shield(self._wanted)

    def fail(self, error: Exception) -> None:
        for future in (self.answer, self._wanted):
            if not future.done():
                future.set_exception(error)
                future.exception()  # a future that nothing awaits would log an error

    def receive(self, command: DeviceCommand) -> None:
        """Apply a command of the scheduler to the lease: `wanted`, `granted` or `refused`."""
        if command.kind == "wanted":
            if not self._wanted.done():
                self._wanted.set_result(None)
        elif self.answer.done():
            return
        elif command.kind == "granted":
            self.freed_bytes += command.freed_bytes
            self.answer.set_result(None)
        else:
            self.answer.set_exception(_Refused(command.reason))


class _Refused(Exception):
    """The scheduler refused a request at its deadline; the message names the blocking leases or members."""


class DeviceLeaseClient:
    """The client of the device service in one role's process.

    Invariants: each command runs once, in its own task; after an error no lease is granted, and every lease fails.
    """

    def __init__(self, service: DeviceService, owner: str, shared: frozenset[str], waiting: Waiting) -> None:
        self._service, self._owner, self._shared, self._waiting = service, owner, shared, waiting
        self._members: dict[str, Offloadable] = {}
        self._leases: dict[str, HeldDeviceLease] = {}
        self._numbers = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._entered: asyncio.Future[None] | None = None
        self._error: Exception | None = None

    # -- calls of the role --------------------------------------------------------------------------------------

    async def join(self, name: str, devices: frozenset[str], member: Offloadable) -> None:
        if devices & self._shared:
            await self._enter()
            self._members[name] = member
            await self._service.join(self._owner, name, devices)

    async def leave(self, name: str) -> None:
        if self._members.pop(name, None) is not None:
            await self._service.leave(self._owner, name)

    @asynccontextmanager
    async def acquire(
        self, devices: frozenset[str], phase: Phase, holders: Holders, deadline_s: float
    ) -> AsyncIterator[DeviceLease]:
        if not devices & self._shared:
            yield NullDeviceLease()
            return
        await self._enter()
        self._numbers += 1
        lease_id = f"{self._owner}/{self._numbers}"
        request = DeviceRequest(lease_id, self._owner, devices, phase, _plain(holders), deadline_s)
        lease = self._leases[lease_id] = HeldDeviceLease(self, request)
        try:
            await self._answered(lease, request, self._service.acquire)
            yield lease
        finally:
            del self._leases[lease_id]
            await self._service.release(self._owner, lease_id)

    async def change_phase(self, lease: HeldDeviceLease, request: DeviceRequest) -> None:
        await self._answered(lease, request, self._service.change_phase)

    async def close(self) -> None:
        """Stop all tasks and remove all members, because the role ends."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for name in tuple(self._members):
            with contextlib.suppress(RelaxError):  # a lost service needs no message
                await self.leave(name)

    async def _answered(
        self, lease: HeldDeviceLease, request: DeviceRequest, ask: Callable[[DeviceRequest], Awaitable[str]]
    ) -> None:
        """Wait until the scheduler grants a request; every `POLL_S`, ask what blocks the request, for `relax why`."""
        loop, deadline_s = asyncio.get_running_loop(), request.deadline_s
        blocked_by, deadline = await ask(request), loop.time() + deadline_s
        if self._error is not None:
            raise self._error
        try:
            async with asyncio.timeout(deadline_s + GRACE_S):
                while not lease.answer.done():
                    left_s = max(deadline - loop.time(), 0.0)
                    with self._waiting(f"the devices, to {request.phase}", blocked_by or SCHEDULER, left_s):
                        await asyncio.wait({lease.answer}, timeout=POLL_S)
                    if not lease.answer.done() and loop.time() < deadline:  # later, the lease may be refused
                        blocked_by = await ask(request)
            lease.answer.result()
        except _Refused as refused:
            reason = f"a lease to {request.phase} on shared devices; held by {str(refused) or 'nobody'}"
            raise DeadlineExceeded(role_of(self._owner), reason, deadline_s) from None
        except TimeoutError:
            reason = f"any answer on a lease to {request.phase}"
            raise DeadlineExceeded(role_of(self._owner), reason, deadline_s + GRACE_S) from None

    # -- commands of the scheduler ------------------------------------------------------------------------------

    async def _enter(self) -> None:
        """Register with the service once; concurrent callers wait for the same registration."""
        if self._error is not None:
            raise self._error
        if self._entered is None:
            self._entered = asyncio.ensure_future(self._begin())
        await asyncio.shield(self._entered)  # a cancelled caller must not cancel the registration for the rest

    async def _begin(self) -> None:
        await self._service.enter(self._owner)
        self._start(self._listen())

    async def _listen(self) -> None:
        after = 0
        try:
            while True:
                for command in await self._service.poll(self._owner, after, POLL_S):
                    after = command.number
                    if command.kind in ("offload", "onload"):
                        self._start(self._obey(command))
                    elif (lease := self._leases.get(command.name)) is not None:
                        lease.receive(command)
        except Exception as error:
            self._fail(error)

    async def _obey(self, command: DeviceCommand) -> None:
        """Offload or load a member; if that fails, remove the member from its devices and fail all leases."""
        freed, member = 0, self._members.get(command.name)
        try:
            if member is not None and command.kind == "offload":
                freed = await member.offload(command.parts)
            elif member is not None:
                await member.onload(command.parts)
            await self._service.done(self._owner, command.number, freed)
        except Exception as error:
            self._fail(error)
            with contextlib.suppress(RelaxError):  # the first error is the one to report
                await self.leave(command.name)

    def _fail(self, error: Exception) -> None:
        """Fail all leases, and every later request, with this error."""
        self._error = error if isinstance(error, RelaxError) else InfrastructureError(f"devices: {error!r}")
        for lease in self._leases.values():
            lease.fail(self._error)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _plain(holders: Holders) -> dict[str, tuple[OffloadPart, ...]]:
    return {name: tuple(parts) for name, parts in holders.items()}
