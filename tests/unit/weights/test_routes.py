# SPDX-License-Identifier: Apache-2.0
"""Routes under any interleaving of publishes, deaths, rollbacks and releases lead every receiver to the newest bytes."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings, strategies as st

from relax_core.api.component import Chosen
from relax_core.api.errors import InfrastructureError
from relax_core.api.weights import PLAIN, Manifest, Payload, Receipt, TensorInfo, Version, combined_fingerprint
from relax_core.testing.weight_transport_fixture import ImmediateRegistry
from relax_core.weights.registry import Route

DISK = Chosen("weight-transport", "disk")
WITHIN_S = 10.0


def manifest(version: Version, content: int, payload: Payload, base: Version | None, live: bool) -> Manifest:
    infos = (TensorInfo("weight", (1,), "F32", str(content), 4),)
    on = str(base) if base else ""
    return Manifest(version, payload, infos, "", on, combined_fingerprint(infos), live=live)


@dataclass
class Receiver:
    name: str
    have: Version | None = None
    content: int | None = None
    route: list[Manifest] = field(default_factory=list)
    deadline: float = 0.0

    def take(self, route: Route, now: float) -> None:
        self.route, self.deadline = [one for one, _ in route], now + WITHIN_S


class World:
    """A publisher, three receivers and what lies on the disk, moved by whatever hypothesis thinks of."""

    def __init__(self, live: bool) -> None:
        self.live = live
        self.registry, self.content = ImmediateRegistry(), 0
        self.contents: dict[Version, int] = {}
        self.stored: dict[Version, Manifest] = {}
        self.newest: Manifest | None = None
        self.open = False
        self.receivers = [Receiver(f"engine-{n}") for n in range(3)]

    @property
    def now(self) -> float:
        return self.registry.time

    def publish(self, kind: str) -> None:
        before, self.content = self.newest, self.content + 1
        last = before.version if before else Version("actor", 0, 0)
        rollback = kind == "rollback" and before is not None
        version = Version("actor", last.incarnation + 1, max(0, last.step - 2)) if rollback else last.next()
        delta = kind == "delta" and before is not None
        self.newest = manifest(version, self.content, "delta" if delta else "full", last if delta else None, self.live)
        self.contents[version] = self.content
        self.registry.announce(self.newest, DISK)
        self.open = self.live
        if not self.live:
            self.stored[version] = self.newest

    def shut(self) -> None:
        if self.newest is not None and self.newest.live:
            self.registry.handed_out(self.newest.version)
            self.open = False

    def serve_waiting(self) -> None:
        """Announce the newest live version again, as the publisher does: whole, since a waiting receiver may lack the base."""
        if self.newest is not None and self.newest.live and self.registry.wanted("actor"):
            version = self.newest.version
            self.newest = manifest(version, self.contents[version], "full", None, True)
            self.registry.announce(self.newest, DISK)
            self.open = True

    def release(self) -> None:
        needed = self.registry.needed("actor")
        self.stored = {version: one for version, one in self.stored.items() if version in needed}

    def ask(self, receiver: Receiver) -> None:
        route = self.registry.route("actor", receiver.have, 0.0, None, receiver.name, WITHIN_S)
        receiver.take(route, self.now)
        if not route and self.newest is not None and receiver.have != self.newest.version:
            assert self.live, "stored versions lead everywhere"
            self.registry.want(receiver.name, "actor")

    def load(self, receiver: Receiver) -> None:
        """The next version of its route."""
        if not receiver.route or self.now >= receiver.deadline:
            receiver.route = []
            return
        link = receiver.route.pop(0)
        if link.live and not (self.open and self.newest is not None and link.version == self.newest.version):
            receiver.route = []  # missed: the transfer is over
            return
        if not link.live:
            assert link.version in self.stored, "released while a receiver was on its way there"
        if link.payload == "delta":
            assert link.base == str(receiver.have), "a delta on something else"
            assert receiver.content == self.contents[receiver.have]  # type: ignore[index]
        receiver.have, receiver.content = link.version, self.contents[link.version]
        proof = Receipt(receiver.name, link.version, "resident", link.wire_fingerprint, 0.0, link.fingerprint, PLAIN)
        if not self.registry.receipt(proof):  # it was abandoned meanwhile
            assert self.newest is not None and link.version.incarnation < self.newest.version.incarnation
            receiver.route = []

    def die(self, receiver: Receiver) -> None:
        self.registry.forget(receiver.name, "actor")
        receiver.have, receiver.content, receiver.route = None, None, []


KINDS = ("full", "delta", "delta", "delta", "rollback")
events = st.lists(
    st.one_of(
        st.tuples(st.just("publish"), st.sampled_from(KINDS)),
        st.tuples(st.sampled_from(("ask", "load", "load", "die")), st.integers(0, 2)),
        st.tuples(st.sampled_from(("shut", "serve", "release")), st.none()),
        st.tuples(st.just("wait"), st.floats(0, 6)),
    ),
    max_size=60,
)


@settings(max_examples=200, deadline=None)
@given(st.booleans(), events)
def test_a_receiver_that_follows_its_route_gets_or_requests_the_newest_version(
    live: bool, happening: list[tuple[str, object]]
) -> None:
    world = World(live)
    for what, which in happening:
        if what == "publish":
            world.publish(str(which))
        elif what == "wait":
            world.registry.time += float(which)  # type: ignore[arg-type]
        elif what in ("ask", "load", "die"):
            getattr(world, what)(world.receivers[which])  # type: ignore[index]
        else:
            {"shut": world.shut, "serve": world.serve_waiting, "release": world.release}[what]()
    if world.newest is None:
        return
    for receiver in world.receivers:
        receiver.route = []
        world.release()
        world.ask(receiver)
        if not receiver.route and receiver.have != world.newest.version:
            assert receiver.name in world.registry.wanted("actor")
            world.serve_waiting()
            world.ask(receiver)
        while receiver.route:
            world.load(receiver)
            world.release()
        assert (receiver.have, receiver.content) == (world.newest.version, world.content)
        assert world.registry.receivers("actor")[receiver.name] == world.newest.version
    world.registry.time += WITHIN_S
    world.release()
    newest = world.newest.version
    assert all(version.incarnation == newest.incarnation for version in world.stored), "nobody can be there any more"


def at(step: int) -> Version:
    return Version("actor", 0, step)


def announced(*kinds: Payload) -> ImmediateRegistry:
    registry = ImmediateRegistry()
    for step, kind in enumerate(kinds, 1):
        registry.announce(manifest(at(step), step, kind, at(step - 1) if kind == "delta" else None, False), DISK)
    return registry


def steps(route: Route) -> list[int]:
    return [one.version.step for one, _ in route]


def test_the_shortest_way_is_taken() -> None:
    registry = announced("full", "full", "delta", "delta")
    assert steps(registry.route("actor", None, 0.0, None, "a", 9.0)) == [2, 3, 4]
    assert steps(registry.route("actor", at(1), 0.0, None, "a", 9.0)) == [2, 3, 4]
    assert steps(registry.route("actor", at(3), 0.0, None, "a", 9.0)) == [4]
    assert steps(registry.route("actor", at(4), 0.0, None, "a", 9.0)) == []


def test_of_adapters_only_the_newest_is_needed() -> None:
    registry = announced("lora", "lora", "lora")
    assert steps(registry.route("actor", None, 0.0, None, "a", 9.0)) == [3]
    registry.time = 0.0
    assert registry.needed("actor") == {at(3)}


def test_a_delta_without_its_base_is_refused() -> None:
    for kinds in (("delta",), ("lora", "delta")):
        with pytest.raises(InfrastructureError, match="publish a full version"):
            announced(*kinds)  # type: ignore[arg-type]
    registry = announced("full", "full")
    with pytest.raises(InfrastructureError, match=r"on top of actor@0\.1, but the newest is actor@0\.2"):
        registry.announce(manifest(at(3), 3, "delta", at(1), False), DISK)


def test_versions_of_a_route_are_kept_until_the_last_is_proved_or_the_lease_ends() -> None:
    registry = announced("full", "delta")
    registry.route("actor", None, 0.0, None, "engine-0", 5.0)
    registry.announce(manifest(at(3), 3, "full", None, False), DISK)
    registry.time = 4.0
    assert registry.needed("actor") == {at(1), at(2), at(3)}
    second = manifest(at(2), 2, "delta", at(1), False)
    registry.receipt(Receipt("engine-0", at(2), "wire", second.wire_fingerprint))
    registry.time = 4.0
    assert registry.needed("actor") == {at(3)}
    registry.route("actor", at(2), 0.0, None, "engine-1", 1.0)
    registry.announce(manifest(at(4), 4, "full", None, False), DISK)
    registry.time = 4.0
    assert registry.needed("actor") == {at(3), at(4)}
    registry.time = 5.0
    assert registry.needed("actor") == {at(4)}


def test_engines_of_one_layout_must_hold_the_same() -> None:
    registry = announced("full")
    wire = manifest(at(1), 1, "full", None, False).wire_fingerprint

    def proof(name: str, resident: str, layout: str) -> Receipt:
        return Receipt(name, at(1), "resident", wire, 0.0, resident, layout)

    registry.receipt(proof("a", "one", "fused"))
    registry.receipt(proof("b", "one", "fused"))
    registry.receipt(proof("c", "two", "sharded"))
    for wrong in (proof("b", "two", "fused"), proof("d", "one", PLAIN), proof("e", "", "fused")):
        with pytest.raises(InfrastructureError, match="must load again"):
            registry.receipt(wrong)
    assert set(registry.receivers("actor")) == {"a", "c"}
