# SPDX-License-Identifier: Apache-2.0
"""The arbiter of a run's devices: who lives on them, who holds them, who sleeps. A state machine; it calls nobody.

Everything that happens to it has a method, and what follows from it is in `orders` afterwards: numbered messages to the
owners (role processes) of members and turns. An owner that is not heard of for its lease is gone, with all it had.
Rules: overlapping turns are never held at once and come in the order they were asked for; within a turn exactly the parts
of its holders are awake; nobody is put to sleep before somebody else needs the devices; sleeping comes before waking.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Literal, get_args

from relax_core.api.devices import OffloadPart, Phase

LEASE_S = 60.0
"""Of an owner's silence; its polls renew the lease."""
PARTS: frozenset[OffloadPart] = frozenset(get_args(OffloadPart))
What = Literal["sleep", "wake", "granted", "refused", "wanted"]
Stage = Literal["waiting", "changing", "held", "void"]
"""Asked for; devices its own while others sleep and its holders wake; had; refused while it was had: only to be let go."""


@dataclass(frozen=True, slots=True)
class DeviceCommand:
    """To one owner: put a member's parts to sleep or wake them, or news of one of its turns."""

    number: int
    owner: str
    what: What
    name: str
    """The member, or the turn."""
    parts: tuple[OffloadPart, ...] = ()
    reason: str = ""
    freed_bytes: int = 0


@dataclass(frozen=True, slots=True)
class DeviceRequest:
    """A turn that somebody wants."""

    id: str
    owner: str
    devices: frozenset[str]
    phase: Phase
    holders: Mapping[str, tuple[OffloadPart, ...]]
    deadline_s: float

    def __str__(self) -> str:
        """As people know it: by its role."""
        return f"{self.owner.partition('#')[0]} ({self.phase})"


@dataclass(slots=True)
class DeviceMember:
    """A living thing on devices."""

    owner: str
    devices: frozenset[str]
    asleep: set[OffloadPart] = field(default_factory=set)
    order: DeviceCommand | None = None
    """What it was told and has not done yet."""


@dataclass(slots=True)
class DevicePlace:
    """A request's place: in the queue, then in its turn."""

    request: DeviceRequest
    deadline: float
    stage: Stage = "waiting"
    devices: frozenset[str] = frozenset()
    """Its own since they were: whoever joins later changes nothing of it."""
    freed_bytes: int = 0
    wanted: bool = False


class DeviceScheduler:
    """All members and turns of a run. Times are the caller's."""

    def __init__(self, lease_s: float = LEASE_S) -> None:
        self._lease_s = lease_s
        self._members: dict[str, DeviceMember] = {}
        self._places: dict[str, DevicePlace] = {}
        """In the order they were asked for."""
        self._seen: dict[str, float] = {}
        self._numbers = 0
        self.orders: list[DeviceCommand] = []

    # -- what happens -------------------------------------------------------------------------------------------

    def join(self, owner: str, name: str, devices: frozenset[str], now: float) -> None:
        """Somebody starts to live there, awake; who had the name before is gone. Safe to repeat."""
        self._seen[owner] = now
        known = self._members.get(name)
        if known is None or (known.owner, known.devices) != (owner, devices):
            self._members[name] = DeviceMember(owner, devices)
        self._advance(now)

    def leave(self, owner: str, name: str, now: float) -> None:
        """It is gone; nothing is asked of it any more."""
        member = self._members.get(name)
        if member is not None and member.owner == owner:
            del self._members[name]
        self._advance(now)

    def ask(self, request: DeviceRequest, now: float) -> str:
        """Queue for a turn; the answer names who is in the way, if anybody is. Safe to repeat."""
        self._seen[request.owner] = now
        if request.id not in self._places:
            self._places[request.id] = DevicePlace(request, now + request.deadline_s)
        self._advance(now)
        place = self._places.get(request.id)
        return self._in_the_way(place) if place is not None and place.stage != "held" else ""

    def become(self, changed: DeviceRequest, now: float) -> str:
        """A turn goes on in another phase, on the devices it has; the answer names who has yet to sleep or wake.

        ValueError where it is not held or needs more.
        """
        place = self._places.get(changed.id)
        if place is None or place.stage not in ("held", "changing") or place.request.owner != changed.owner:
            raise ValueError(f"turn {changed.id}: got a change to {changed.phase}, it is not held; acquire one")
        if more := self._devices(changed) - place.devices:
            raise ValueError(
                f"turn {changed.id}: {changed.phase} needs {sorted(more)} too; acquire all devices at first"
            )
        if place.request != changed:
            place.request, place.deadline, place.stage = changed, now + changed.deadline_s, "changing"
            place.freed_bytes = 0
        self._advance(now)
        return self._in_the_way(place) if place.stage != "held" else ""

    def let_go(self, owner: str, turn: str, now: float) -> None:
        """A turn is over, or no longer wanted."""
        place = self._places.get(turn)
        if place is not None and place.request.owner == owner:
            del self._places[turn]
        self._advance(now)

    def done(self, owner: str, number: int, freed_bytes: int, now: float) -> None:
        """A member did what it was told. Told twice, or by one that is gone, it is no news."""
        self._seen[owner] = now
        for member in self._members.values():
            if member.order is not None and member.order.number == number:
                if member.order.what == "sleep":
                    member.asleep |= set(member.order.parts)
                    self._credit(member, freed_bytes)
                member.order = None
        self._advance(now)

    def heard(self, owner: str, now: float) -> None:
        """An owner is alive. Deadlines and leases that ran out by now are noticed."""
        self._seen[owner] = now
        self._advance(now)

    def gone(self, owners: Iterable[str], now: float) -> None:
        """Owners died: so did their members, and their turns are free."""
        for owner in tuple(owners):
            self._seen.pop(owner, None)
            self._members = {name: member for name, member in self._members.items() if member.owner != owner}
            self._places = {name: place for name, place in self._places.items() if place.request.owner != owner}
        self._advance(now)

    @property
    def owners(self) -> tuple[str, ...]:
        return tuple(self._seen)

    def next_at(self) -> float | None:
        """When something runs out next, if nothing happens before."""
        times = [place.deadline for place in self._places.values() if place.stage in ("waiting", "changing")]
        return min((*times, *(seen + self._lease_s for seen in self._seen.values())), default=None)

    # -- what follows -------------------------------------------------------------------------------------------

    def _advance(self, now: float) -> None:
        lapsed = [owner for owner, seen in self._seen.items() if now >= seen + self._lease_s]
        if lapsed:
            self.gone(lapsed, now)
            return
        self._refuse_late(now)
        taken = frozenset[str]().union(*(place.devices for place in self._had()))
        for place in [place for place in self._places.values() if place.stage == "waiting"]:
            devices = self._devices(place.request)
            if not devices & taken:
                place.stage, place.devices = "changing", devices
            taken |= devices
        for place in self._had():
            self._settle(place)
        for place in self._places.values():
            if place.stage == "waiting":
                self._want(self._devices(place.request))

    def _refuse_late(self, now: float) -> None:
        for place in [place for place in self._places.values() if now >= place.deadline]:
            if place.stage == "waiting":
                self._tell(place, "refused", reason=self._in_the_way(place))
                del self._places[place.request.id]
            elif place.stage == "changing":  # it keeps the devices until it lets go: a holder may be at work on them
                self._tell(place, "refused", reason=self._in_the_way(place))
                place.stage = "void"

    def _want(self, devices: frozenset[str]) -> None:
        for place in self._had():
            if place.stage == "held" and not place.wanted and place.devices & devices:
                place.wanted = True
                self._tell(place, "wanted")

    def _settle(self, place: DevicePlace) -> None:
        """Put to sleep what no holder needs; when all that sleeps, wake what holders need; then the turn is theirs."""
        if place.stage == "void":
            return
        living, holders = self._living(place.devices), place.request.holders
        for name, member in living.items():
            awake = frozenset(holders.get(name, ()))
            if member.order is None and (too_much := PARTS - awake - member.asleep):
                self._order(member, "sleep", name, too_much)
        if place.stage == "held" or any(member.order is not None for member in living.values()):
            return
        for name, member in living.items():
            if lacking := member.asleep & frozenset(holders.get(name, ())):
                member.asleep -= lacking
                self._order(member, "wake", name, lacking)
        if all(member.order is None for member in living.values()):
            place.stage = "held"
            self._tell(place, "granted", freed_bytes=place.freed_bytes)
            place.freed_bytes = 0

    def _had(self) -> list[DevicePlace]:
        return [place for place in self._places.values() if place.stage != "waiting"]

    def _devices(self, request: DeviceRequest) -> frozenset[str]:
        """What is asked for, and where its holders live: none of them may be put to sleep by another."""
        living = (self._members[name].devices for name in request.holders if name in self._members)
        return request.devices.union(*living)

    def _living(self, devices: frozenset[str]) -> dict[str, DeviceMember]:
        return {name: member for name, member in self._members.items() if member.devices & devices}

    def _credit(self, member: DeviceMember, freed_bytes: int) -> None:
        for place in self._had():
            if place.devices & member.devices:
                place.freed_bytes += freed_bytes

    def _in_the_way(self, place: DevicePlace) -> str:
        """Who, and for what: turns before it that overlap, then members that have yet to sleep or wake."""
        devices = place.devices or self._devices(place.request)
        earlier = takewhile(lambda other: other is not place, self._places.values())
        before = [other for other in earlier if (other.devices or self._devices(other.request)) & devices]
        if place.stage == "waiting" and before:
            return ", then ".join(str(other.request) for other in before)
        orders = [member.order for member in self._living(devices).values() if member.order is not None]
        return ", ".join(f"{order.name} (has yet to {order.what})" for order in orders)

    def _order(self, member: DeviceMember, what: What, name: str, parts: Iterable[OffloadPart]) -> None:
        member.order = self._send(member.owner, what, name, tuple(sorted(parts)))

    def _tell(self, place: DevicePlace, what: What, reason: str = "", freed_bytes: int = 0) -> None:
        self._send(place.request.owner, what, place.request.id, reason=reason, freed_bytes=freed_bytes)

    def _send(
        self,
        owner: str,
        what: What,
        name: str,
        parts: tuple[OffloadPart, ...] = (),
        reason: str = "",
        freed_bytes: int = 0,
    ) -> DeviceCommand:
        self._numbers += 1
        order = DeviceCommand(self._numbers, owner, what, name, parts, reason, freed_bytes)
        self.orders.append(order)
        return order
