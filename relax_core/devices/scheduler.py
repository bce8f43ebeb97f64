# SPDX-License-Identifier: Apache-2.0
"""The scheduler of a run's devices: a pure state machine that grants device leases in order, and its service."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Literal, TypeVar, get_args

from relax_core.api.errors import InfrastructureError
from relax_core.api.plan import OffloadPart
from relax_core.api.role import Clock, Phase
from relax_core.rpc import messages
from relax_core.rpc.waiting import TimedCondition

SILENCE_S = 60.0
"""Seconds without a call from an owner until the owner counts as dead; each poll shows that it is alive."""
PARTS: frozenset[OffloadPart] = frozenset(get_args(OffloadPart))
CommandKind = Literal["offload", "onload", "granted", "refused", "wanted"]
T = TypeVar("T")


@messages.register
@dataclass(frozen=True, slots=True)
class DeviceCommand:
    """A message to one owner: offload or onload parts of a member, or news of one of its leases."""

    number: int
    owner: str
    kind: CommandKind
    name: str
    """Name of the member, or id of the lease."""
    parts: tuple[OffloadPart, ...] = ()
    reason: str = ""
    freed_bytes: int = 0


@messages.register
@dataclass(frozen=True, slots=True)
class DeviceRequest:
    """A request for a device lease, or for a change of its phase."""

    id: str
    owner: str
    devices: frozenset[str]
    phase: Phase
    holders: Mapping[str, tuple[OffloadPart, ...]]
    deadline_s: float

    def __str__(self) -> str:
        """Return role and phase as text for messages."""
        return f"{role_of(self.owner)} ({self.phase})"


@dataclass(slots=True)
class DeviceMember:
    """An engine pool or a rank group that uses devices."""

    owner: str
    devices: frozenset[str]
    offloaded: set[OffloadPart] = field(default_factory=set)
    command: DeviceCommand | None = None
    """Command that was sent to the member and is not done yet."""


@dataclass(slots=True)
class LeaseState:
    """A request in the queue, and later the lease that results from it."""

    request: DeviceRequest
    deadline: float
    stage: Literal["waiting", "preparing", "held", "void"] = "waiting"
    devices: frozenset[str] = frozenset()
    """Devices of the lease, fixed when preparation starts; a member that joins later does not change them."""
    freed_bytes: int = 0
    wanted: bool = False


class DeviceScheduler:
    """All members and leases of a run, as a pure state machine: callers pass the time and deliver `commands`.

    A lease: `waiting -> preparing -> held -> released`; a change of phase leads from `held` back to `preparing`.
    A deadline that passes: `waiting -> refused`, and `preparing -> void -> released`. A void lease keeps its devices
    until its owner releases them, because a holder may be using them.

    Invariants:
    - Leases that are not waiting never overlap, and overlapping leases are granted in the order of their requests.
    - Under a held lease exactly the parts of its holders are loaded on its devices. If a holder joined later and also
      uses devices of a second lease, only the parts that both leases name are loaded.
    - Nothing is offloaded before a lease needs the devices for its own holders. All offloading precedes any loading.
    - The owner of a held lease gets one `wanted` command when its devices are wanted.
    - An owner that is silent for `silence_s` loses all its members and leases.
    """

    def __init__(self, silence_s: float = SILENCE_S) -> None:
        self._silence_s = silence_s
        self._members: dict[str, DeviceMember] = {}
        self._leases: dict[str, LeaseState] = {}
        """id -> lease, in the order of the requests."""
        self._seen: dict[str, float] = {}
        self._numbers = 0
        self.commands: list[DeviceCommand] = []

    # -- events -------------------------------------------------------------------------------------------------

    def join(self, owner: str, name: str, devices: frozenset[str], now: float) -> None:
        """Add a member with all parts loaded, replacing a member of the same name. Safe to repeat."""
        self._seen[owner] = now
        known = self._members.get(name)
        if known is None or (known.owner, known.devices) != (owner, devices):
            self._members[name] = DeviceMember(owner, devices)
        self._advance(now)

    def leave(self, owner: str, name: str, now: float) -> None:
        """Remove a member and send no further commands to it."""
        member = self._members.get(name)
        if member is not None and member.owner == owner:
            del self._members[name]
        self._advance(now)

    def acquire(self, request: DeviceRequest, now: float) -> str:
        """Queue a request; return the leases or members that block it, "" if it is granted. Safe to repeat."""
        self._seen[request.owner] = now
        if request.id not in self._leases:
            self._leases[request.id] = LeaseState(request, now + request.deadline_s)
        self._advance(now)
        lease = self._leases.get(request.id)
        return self._in_the_way(lease) if lease is not None and lease.stage != "held" else ""

    def change_phase(self, changed: DeviceRequest, now: float) -> str:
        """Change the phase of a lease on its devices; return the members that must still offload or load.

        Raises ValueError if the lease is not held, or if the phase needs more devices than the lease has.
        """
        lease = self._leases.get(changed.id)
        if lease is None or lease.stage not in ("held", "preparing") or lease.request.owner != changed.owner:
            raise ValueError(
                f"device lease {changed.id}: got a change to {changed.phase}, but the lease is not held; acquire a lease first"
            )
        if more := self._devices(changed) - lease.devices:
            raise ValueError(
                f"device lease {changed.id}: {changed.phase} also needs {sorted(more)}; acquire all devices from the start"
            )
        if lease.request != changed:
            lease.request, lease.deadline, lease.stage = changed, now + changed.deadline_s, "preparing"
            lease.freed_bytes = 0
        self._advance(now)
        return self._in_the_way(lease) if lease.stage != "held" else ""

    def release(self, owner: str, lease_id: str, now: float) -> None:
        """End a lease, or withdraw its request."""
        lease = self._leases.get(lease_id)
        if lease is not None and lease.request.owner == owner:
            del self._leases[lease_id]
        self._advance(now)

    def done(self, owner: str, number: int, freed_bytes: int, now: float) -> None:
        """Record that a member has carried out a command; repeated and outdated calls have no effect."""
        self._seen[owner] = now
        for member in self._members.values():
            if member.command is not None and member.command.number == number:
                if member.command.kind == "offload":
                    member.offloaded |= set(member.command.parts)
                    for lease in self._granted():
                        if lease.devices & member.devices:
                            lease.freed_bytes += freed_bytes
                member.command = None
        self._advance(now)

    def seen(self, owner: str, now: float) -> None:
        """Record that an owner is alive; also refuse leases past their deadlines, and remove silent owners."""
        self._seen[owner] = now
        self._advance(now)

    def forget(self, owners: Iterable[str], now: float) -> None:
        """Remove dead owners with their members and leases."""
        for owner in tuple(owners):
            self._seen.pop(owner, None)
            self._members = {name: member for name, member in self._members.items() if member.owner != owner}
            self._leases = {name: lease for name, lease in self._leases.items() if lease.request.owner != owner}
        self._advance(now)

    @property
    def owners(self) -> tuple[str, ...]:
        return tuple(self._seen)

    def next_at(self) -> float | None:
        """Return when the next deadline passes or the next owner counts as dead; None if neither is pending."""
        times = [lease.deadline for lease in self._leases.values() if lease.stage in ("waiting", "preparing")]
        return min((*times, *(seen + self._silence_s for seen in self._seen.values())), default=None)

    # -- consequences -------------------------------------------------------------------------------------------

    def _advance(self, now: float) -> None:
        """Refuse late leases, drop silent owners, and move every lease as far as possible."""
        silent = [owner for owner, seen in self._seen.items() if now >= seen + self._silence_s]
        if silent:
            self.forget(silent, now)
            return
        for lease in [lease for lease in self._leases.values() if now >= lease.deadline]:
            if lease.stage in ("waiting", "preparing"):
                self._tell(lease, "refused", reason=self._in_the_way(lease))
                if lease.stage == "waiting":
                    del self._leases[lease.request.id]
                else:
                    lease.stage = "void"
        taken = frozenset[str]().union(*(lease.devices for lease in self._granted()))
        for lease in [lease for lease in self._leases.values() if lease.stage == "waiting"]:
            devices = self._devices(lease.request)
            if not devices & taken:
                lease.stage, lease.devices = "preparing", devices
            taken |= devices
        for lease in self._granted():
            if lease.stage != "void":
                self._prepare(lease)
        for waiting in [lease for lease in self._leases.values() if lease.stage == "waiting"]:
            for holder in self._granted():
                if holder.stage == "held" and not holder.wanted and holder.devices & self._devices(waiting.request):
                    holder.wanted = True
                    self._tell(holder, "wanted")

    def _prepare(self, lease: LeaseState) -> None:
        """Offload parts that no holder needs; when that is done, load parts that holders need; then grant the lease."""
        living = self._living(lease.devices)
        for name, member in living.items():
            if member.command is None and (too_much := PARTS - self._wanted(name) - member.offloaded):
                member.command = self._send(member.owner, "offload", name, tuple(sorted(too_much)))
        if lease.stage == "held" or any(member.command is not None for member in living.values()):
            return
        for name, member in living.items():
            if lacking := member.offloaded & self._wanted(name):
                member.offloaded -= lacking
                member.command = self._send(member.owner, "onload", name, tuple(sorted(lacking)))
        if all(member.command is None for member in living.values()):
            lease.stage = "held"
            self._tell(lease, "granted", freed_bytes=lease.freed_bytes)
            lease.freed_bytes = 0

    def _wanted(self, name: str) -> frozenset[OffloadPart]:
        """Return the parts that a member may have loaded: the parts that every lease on its devices names for it.

        Several leases cover one member only if the member joined after they were prepared.
        """
        devices = self._members[name].devices
        return PARTS.intersection(
            *(lease.request.holders.get(name, ()) for lease in self._granted() if lease.devices & devices)
        )

    def _granted(self) -> list[LeaseState]:
        return [lease for lease in self._leases.values() if lease.stage != "waiting"]

    def _devices(self, request: DeviceRequest) -> frozenset[str]:
        """Return the requested devices and all devices of the holders, so that no second lease offloads a holder."""
        living = (self._members[name].devices for name in request.holders if name in self._members)
        return request.devices.union(*living)

    def _living(self, devices: frozenset[str]) -> dict[str, DeviceMember]:
        return {name: member for name, member in self._members.items() if member.devices & devices}

    def _in_the_way(self, lease: LeaseState) -> str:
        """Return the earlier leases that overlap with a lease, or else the members that must still offload or load."""
        devices = lease.devices or self._devices(lease.request)
        earlier = takewhile(lambda other: other is not lease, self._leases.values())
        before = [other for other in earlier if (other.devices or self._devices(other.request)) & devices]
        if lease.stage == "waiting" and before:
            return ", then ".join(str(other.request) for other in before)
        commands = [member.command for member in self._living(devices).values() if member.command is not None]
        return ", ".join(f"{command.name} (has yet to {command.kind})" for command in commands)

    def _tell(self, lease: LeaseState, kind: CommandKind, reason: str = "", freed_bytes: int = 0) -> None:
        self._send(lease.request.owner, kind, lease.request.id, reason=reason, freed_bytes=freed_bytes)

    def _send(
        self, owner: str, kind: CommandKind, name: str, parts: tuple[OffloadPart, ...] = (), reason: str = "",
        freed_bytes: int = 0,
    ) -> DeviceCommand:  # fmt: skip
        self._numbers += 1
        command = DeviceCommand(self._numbers, owner, kind, name, parts, reason, freed_bytes)
        self.commands.append(command)
        return command


class DeviceService:
    """The scheduler with a clock and an inbox for each owner; roles call the service directly or through the hub.

    Invariants: each call is safe to repeat after a lost answer. Deadlines are checked during polls, and every owner
    that waits for a lease polls.
    """

    def __init__(self, clock: Clock, silence_s: float = SILENCE_S) -> None:
        self._clock, self._scheduler = clock, DeviceScheduler(silence_s)
        self._inboxes: dict[str, list[DeviceCommand]] = {}
        self._owners: tuple[str, ...] = ()
        self._changes = TimedCondition(clock, self._scheduler.next_at)

    async def enter(self, owner: str) -> None:
        """Register an owner; a former owner of this name loses its members and leases."""
        self._scheduler.forget([owner], self._clock.now())
        self._inboxes[owner] = []
        self._do(self._scheduler.seen, owner)

    async def join(self, owner: str, name: str, devices: frozenset[str]) -> None:
        self._check(owner)
        self._do(self._scheduler.join, owner, name, devices)

    async def leave(self, owner: str, name: str) -> None:
        self._do(self._scheduler.leave, owner, name)

    async def acquire(self, request: DeviceRequest) -> str:
        """Queue a request; return the leases or members that block it."""
        self._check(request.owner)
        return self._do(self._scheduler.acquire, request)

    async def change_phase(self, request: DeviceRequest) -> str:
        """Change the phase of a lease; return the members that must still offload or load."""
        self._check(request.owner)
        return self._do(self._scheduler.change_phase, request)

    async def release(self, owner: str, lease_id: str) -> None:
        self._do(self._scheduler.release, owner, lease_id)

    async def done(self, owner: str, number: int, freed_bytes: int) -> None:
        """Record that a member of the owner has carried out a command."""
        self._check(owner)
        self._do(self._scheduler.done, owner, number, freed_bytes)

    async def poll(self, owner: str, after: int, wait_s: float) -> tuple[DeviceCommand, ...]:
        """Return the commands after number `after`; wait up to `wait_s` for one. Renews the owner's sign of life."""

        def unread(now: float) -> tuple[DeviceCommand, ...] | None:
            self._check(owner)
            self._do(self._scheduler.seen, owner)
            self._inboxes[owner] = [command for command in self._inboxes[owner] if command.number > after]
            return tuple(self._inboxes[owner]) or None

        return await self._changes.wait_for(unread, wait_s) or ()

    async def gone(self, role: str) -> None:
        """Remove the members and leases of a role whose process died."""
        self._do(self._scheduler.forget, [owner for owner in self._scheduler.owners if role_of(owner) == role])

    def _check(self, owner: str) -> None:
        if owner not in self._scheduler.owners:
            raise InfrastructureError(
                f"devices: {owner} did not call for {SILENCE_S:.0f} s and lost its devices; restart the role"
            )

    def _do(self, event: Callable[..., T], *args: object) -> T:
        """Apply an event now, and deliver the resulting commands to the owners' inboxes."""
        answer = event(*args, self._clock.now())
        commands, self._scheduler.commands = self._scheduler.commands, []
        for command in commands:
            self._inboxes.setdefault(command.owner, []).append(command)
        known, self._owners = self._owners, self._scheduler.owners
        if commands or known != self._owners:  # the poll of a removed owner must wake up and raise
            self._changes.notify()
        return answer


def owner_of(role: str, registration: int) -> str:
    """Return the owner name of a role's process."""
    return f"{role}#{registration}"


def role_of(owner: str) -> str:
    return owner.partition("#")[0]
