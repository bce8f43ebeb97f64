# SPDX-License-Identifier: Apache-2.0
"""The device scheduler: who holds devices, who is offloaded, who is refused. Random members, deaths and slow ones.

The machine at the end shows what holds in any order of events; the tests before it show what a caller gets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from relax_core.api.plan import OffloadPart
from relax_core.devices.scheduler import PARTS, DeviceCommand, DeviceRequest, DeviceScheduler

BOTH = frozenset({"gpu:0", "gpu:1"})
ENGINE: tuple[OffloadPart, ...] = ("weights", "kv")
TRAINER: tuple[OffloadPart, ...] = ("weights", "optimizer", "gradients")


class Stage:
    """A scheduler, and owners who do at once what they are told."""

    def __init__(self, **lives: frozenset[str]) -> None:
        self.scheduler, self.now = DeviceScheduler(), 0.0
        self.awake: dict[str, set[OffloadPart]] = {name: set(PARTS) for name in lives}
        self.told: list[DeviceCommand] = []
        for name, devices in lives.items():
            self.scheduler.join(name, name, devices, 0.0)

    def acquire(
        self,
        lease: str,
        owner: str,
        devices: frozenset[str],
        holders: Mapping[str, tuple[OffloadPart, ...]],
        by: float = 9.0,
    ) -> str:
        in_the_way = self.scheduler.acquire(DeviceRequest(lease, owner, devices, "train", holders, by), self.now)
        self.obey()
        return in_the_way

    def obey(self, but: Sequence[str] = ()) -> None:
        while commands := [command for command in self.scheduler.commands if command.name not in but]:
            self.scheduler.commands = [command for command in self.scheduler.commands if command.name in but]
            self.told += commands
            for command in commands:
                if command.kind == "offload":
                    self.awake[command.name] -= set(command.parts)
                elif command.kind == "onload":
                    self.awake[command.name] |= set(command.parts)
                else:
                    continue
                self.scheduler.done(command.owner, command.number, 7, self.now)

    def news(self, lease: str) -> list[str]:
        return [command.kind for command in self.told if command.name == lease]

    def orders_to(self, *names: str) -> list[tuple[str, str]]:
        return [(command.kind, command.name) for command in self.told if command.name in names]


def test_a_lease_offloads_others_before_it_onloads_its_holders() -> None:
    stage = Stage(rollout=BOTH, actor=BOTH)
    stage.acquire("g", "rollout", BOTH, {"rollout": ENGINE})
    stage.scheduler.release("rollout", "g", 1.0)
    stage.told.clear()
    stage.acquire("t", "actor", BOTH, {"actor": TRAINER})
    assert stage.orders_to("rollout", "actor") == [("offload", "rollout"), ("onload", "actor")]
    assert stage.news("t") == ["granted"]
    assert (stage.awake["rollout"], stage.awake["actor"]) == (set(), set(TRAINER))
    assert stage.told[-1].freed_bytes == 7


def test_the_same_holder_again_costs_nothing() -> None:
    stage = Stage(rollout=BOTH, actor=BOTH)
    stage.acquire("one", "rollout", BOTH, {"rollout": ENGINE})
    stage.scheduler.release("rollout", "one", 1.0)
    stage.told.clear()
    stage.acquire("two", "rollout", BOTH, {"rollout": ENGINE})
    assert [command.kind for command in stage.told] == ["granted"]


def test_leases_on_different_devices_run_in_parallel_and_requests_keep_their_order() -> None:
    stage = Stage(rollout=frozenset({"gpu:0"}), actor=BOTH, reference=frozenset({"gpu:1"}))
    stage.acquire("g", "rollout", frozenset({"gpu:0"}), {"rollout": ENGINE})
    stage.acquire("t", "actor", BOTH, {"actor": TRAINER})
    stage.acquire("f", "reference", frozenset({"gpu:1"}), {"reference": ("weights",)})
    assert (stage.news("t"), stage.news("f")) == ([], [])  # gpu:1 is free, but the actor asked first
    stage.scheduler.forget(["actor"], 1.0)
    stage.obey()
    assert stage.news("f") == ["granted"]


def test_a_publish_continues_from_training_with_both_sides_awake() -> None:
    stage = Stage(rollout=BOTH, actor=BOTH)
    stage.acquire("t", "actor", BOTH, {"actor": TRAINER})
    stage.acquire("g", "rollout", BOTH, {"rollout": ENGINE})
    both: dict[str, tuple[OffloadPart, ...]] = {"actor": ("weights",), "rollout": ("weights",)}
    blocker = stage.scheduler.change_phase(DeviceRequest("t", "actor", BOTH, "publish", both, 9.0), 1.0)
    assert blocker == "actor (has yet to offload)"
    stage.obey()
    assert stage.awake == {"rollout": {"weights"}, "actor": {"weights"}}
    assert stage.news("t") == ["granted", "wanted", "granted"] and stage.news("g") == []


def test_a_late_member_on_the_devices_of_two_leases_loads_only_parts_that_both_allow() -> None:
    stage = Stage(rollout=frozenset({"gpu:0"}), actor=frozenset({"gpu:1"}))
    stage.acquire("g", "rollout", frozenset({"gpu:0"}), {"reference": ENGINE})
    stage.acquire("t", "actor", frozenset({"gpu:1"}), {"reference": ("weights",)})
    stage.scheduler.join("reference", "reference", BOTH, 1.0)
    stage.awake["reference"] = set(PARTS)
    stage.obey()
    assert stage.awake["reference"] == {"weights"}


def test_a_request_fails_at_its_deadline_and_names_the_holder_of_the_devices() -> None:
    stage = Stage(rollout=BOTH, actor=BOTH)
    stage.acquire("t", "actor", BOTH, {"actor": TRAINER})
    stage.acquire("g", "rollout", BOTH, {"rollout": ENGINE}, by=2.0)
    assert stage.scheduler.next_at() == 2.0
    stage.scheduler.seen("rollout", 2.0)
    stage.obey()
    assert (stage.told[-1].kind, stage.told[-1].name, stage.told[-1].reason) == ("refused", "g", "actor (train)")


def test_a_slow_member_is_named_and_its_end_frees_the_devices() -> None:
    stage = Stage(rollout=BOTH, actor=BOTH)
    stage.scheduler.acquire(DeviceRequest("t", "actor", BOTH, "train", {"actor": TRAINER}, 2.0), 0.0)
    stage.obey(but=["rollout"])
    stage.scheduler.seen("actor", 2.0)
    assert stage.scheduler.commands[-1].reason == "rollout (has yet to offload)"
    stage.scheduler.release("actor", "t", 2.0)
    stage.scheduler.forget(["rollout"], 3.0)
    stage.now = 3.0
    stage.acquire("again", "actor", BOTH, {"actor": TRAINER})
    assert stage.news("again") == ["granted"]


def test_an_owner_that_is_silent_loses_what_it_had() -> None:
    stage = Stage(rollout=BOTH, actor=BOTH)
    stage.acquire("t", "actor", BOTH, {"actor": TRAINER})
    stage.scheduler.seen("rollout", 50.0)
    stage.now = 50.0
    stage.acquire("g", "rollout", BOTH, {"rollout": ENGINE}, by=100.0)
    assert stage.news("g") == [] and stage.scheduler.next_at() == 60.0
    stage.scheduler.seen("rollout", 60.0)
    stage.obey()
    assert stage.news("g") == ["granted"] and stage.scheduler.owners == ("rollout",)


DEVICES = [f"gpu:{number}" for number in range(3)]
NAMES = st.sampled_from([f"m{number}" for number in range(4)])
SETS = st.frozensets(st.sampled_from(DEVICES), min_size=1)
HOLDING = st.dictionaries(NAMES, st.lists(st.sampled_from(sorted(PARTS)), unique=True).map(tuple), max_size=3)


class Devices(RuleBasedStateMachine):
    """Every owner has one member of its own name; who is told to offload or onload does so some time later, or dies."""

    @initialize()
    def begin(self) -> None:
        self.scheduler, self.now = DeviceScheduler(silence_s=1e9), 0.0
        self.awake: dict[str, set[OffloadPart]] = {}
        self.lives: dict[str, frozenset[str]] = {}
        self.open: list[DeviceCommand] = []
        self.requests: dict[str, DeviceRequest] = {}
        self.until: dict[str, float] = {}
        """Of requests without an answer."""
        self.held: dict[str, frozenset[str]] = {}
        self.wanted: set[str] = set()
        self.late: set[str] = set()
        """Members that joined while somebody had their devices, and have yet to be offloaded."""

    def take(self) -> None:
        commands, self.scheduler.commands = self.scheduler.commands, []
        for command in commands:
            if command.kind in ("offload", "onload"):
                if command.kind == "onload":  # from now on it may be awake
                    around = [other for other in self.open if self.lives[other.name] & self.lives[command.name]]
                    assert all(other.kind == "onload" for other in around)
                    self.awake[command.name] |= set(command.parts)
                self.open.append(command)
            elif command.kind == "wanted":
                assert command.name in self.held and command.name not in self.wanted
                self.wanted.add(command.name)
            else:
                self.until.pop(command.name)
                if command.kind == "granted":
                    request = self.requests[command.name]
                    living = (self.lives[name] for name in request.holders if name in self.lives)
                    self.held[command.name] = request.devices.union(*living)

    @rule(name=NAMES, devices=SETS)
    def join(self, name: str, devices: frozenset[str]) -> None:
        if name in self.lives:
            return
        self.lives[name], self.awake[name] = devices, set(PARTS)
        self.late.add(name)
        self.scheduler.join(name, name, devices, self.now)
        self.take()

    @rule(name=NAMES, devices=SETS, holders=HOLDING, seconds=st.integers(1, 50), data=st.data())
    def acquire(
        self,
        name: str,
        devices: frozenset[str],
        holders: dict[str, tuple[OffloadPart, ...]],
        seconds: int,
        data: st.DataObject,
    ) -> None:
        if name not in self.lives or any(lease.startswith(name) for lease in (*self.until, *self.held)):
            return
        lease = f"{name}/{len(self.requests)}"
        self.requests[lease] = DeviceRequest(lease, name, devices, "train", holders, float(seconds))
        self.until[lease] = self.now + seconds
        self.scheduler.acquire(self.requests[lease], self.now)
        self.take()

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def obey(self, data: st.DataObject) -> None:
        command = data.draw(st.sampled_from(self.open))
        self.open.remove(command)
        if command.kind == "offload":
            self.awake[command.name] -= set(command.parts)
            self.late.discard(command.name)
        for _ in range(data.draw(st.integers(1, 2))):  # its answer may be told twice
            self.scheduler.done(command.owner, command.number, 1, self.now)
        self.take()

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(sorted(self.held)))
        del self.held[lease]
        self.scheduler.release(self.requests[lease].owner, lease, self.now)
        self.take()

    @precondition(lambda self: self.lives)
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.lives)))
        del self.lives[name], self.awake[name]
        self.late.discard(name)
        self.open = [command for command in self.open if command.owner != name]
        for leases in (self.held, self.until):
            for lease in [lease for lease in leases if lease.startswith(f"{name}/")]:
                del leases[lease]
        self.scheduler.forget([name], self.now)
        self.take()

    @rule(seconds=st.integers(1, 30))
    def pass_time(self, seconds: int) -> None:
        self.now += seconds
        for name in self.lives:
            self.scheduler.seen(name, self.now)
        refused = [command.name for command in self.scheduler.commands if command.kind == "refused"]
        self.take()
        for lease in refused:
            self.scheduler.release(self.requests[lease].owner, lease, self.now)
        self.take()

    @invariant()
    def leases_never_overlap(self) -> None:
        held = list(self.held.values())
        assert sum(map(len, held)) == len(frozenset().union(*held))

    @invariant()
    def under_a_lease_only_its_holders_parts_are_awake(self) -> None:
        for lease, devices in self.held.items():
            holders = self.requests[lease].holders
            for name in self.lives.keys() - self.late:
                if self.lives[name] & devices:
                    assert self.awake[name] <= set(holders.get(name, ())), (lease, name)
                if self.lives[name] <= devices:
                    assert self.awake[name] >= set(holders.get(name, ())), (lease, name)

    @invariant()
    def every_request_is_answered_by_its_deadline(self) -> None:
        if self.lives:
            assert all(deadline > self.now for deadline in self.until.values())

    @invariant()
    def whoever_keeps_others_waiting_is_told(self) -> None:
        for lease in self.until:
            keepers = {name for name, devices in self.held.items() if devices & self.requests[lease].devices}
            assert keepers <= self.wanted

    @invariant()
    def nobody_waits_for_free_devices(self) -> None:
        if not self.open and not self.held:
            assert not self.until


TestDevices = Devices.TestCase
TestDevices.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
